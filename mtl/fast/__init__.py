"""Everything that is tuned to one kind of processor, behind one question: ``applies(x)``.

Outside this package all functions are plain, differentiable torch. The decorator ``accelerated`` joins such a function
to a faster version of it; it is the only place that chooses between the two. A fast version gives the same values and
gradients as the plain one (``tests/unit/test_fast.py`` compares all pairs in ``REGISTER``), and can be differentiated
once. ``enable(False)``, in a run ``fast=false``, switches all of them off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from mtl import compat

P = ParamSpec("P")
R = TypeVar("R")
REGISTER: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # name -> (plain function, its fast version)
CHUNK_ROWS = 512
_enabled = True
_used: set[str] = set()


def applies(x: Tensor, on: str = "cpu") -> bool:
    """Say whether fast versions for the device type ``on`` may take ``x``.

    They may if they are switched on, ``x`` is there, and torch executes eagerly (it neither compiles nor exports, and
    no transform of ``torch.func`` is active). Those for the CPU take float32 and float64, and no autocast.
    """
    if not _enabled or torch.compiler.is_compiling() or x.device.type != on:
        return False
    precise = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    return (precise or on != "cpu") and not compat.functorch_active()


def accelerated(cpu: Callable[P, R], cuda: Callable[P, R] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let the decorated plain function, or method, run as its fast version for the device of its first tensor.

    It does where ``applies`` says so of this tensor, and of a parameter, if it is a method of a module: inputs and
    gates are float32 even in a bfloat16 network.
    """

    def decorate(plain: Callable[P, R]) -> Callable[P, R]:
        name = plain.__qualname__
        REGISTER[name] = plain, cpu
        versions = {"cpu": cpu}
        if cuda is not None:
            REGISTER[f"{name} on a GPU"] = plain, cuda
            versions["cuda"] = cuda

        @functools.wraps(plain)
        def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
            first = next((x for x in args if isinstance(x, Tensor)), None)
            own = next(args[0].parameters(), first) if isinstance(args[0], nn.Module) else first
            if first is None or own is None:
                return plain(*args, **kwargs)
            device = first.device.type
            if device in versions and applies(first, device) and applies(own, device):
                _used.add(name)
                return versions[device](*args, **kwargs)
            return plain(*args, **kwargs)

        return chosen

    return decorate


def chunk_rows(x: Tensor) -> int | None:
    """Return how many rows of ``x`` to compute at a time, None for all.

    Where no gradient is taken, what a layer writes of a large batch has left the processor's cache when it is read.
    """
    return CHUNK_ROWS if applies(x) and not torch.is_grad_enabled() else None


def exporting() -> bool:
    """Say whether torch is exporting a program: Python must not branch on the values of tensors then."""
    return bool(torch.compiler.is_exporting())


def enable(on: bool) -> None:
    """Switch the fast versions on or off, for the whole process, and forget which ones ran."""
    global _enabled
    _enabled = on
    _used.clear()


@contextmanager
def disabled() -> Iterator[None]:
    """Run the plain functions inside this context."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def used() -> list[str]:
    """Return the names of the functions that have run in their fast version."""
    return sorted(_used)
