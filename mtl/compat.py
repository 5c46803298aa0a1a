"""The register of private or undocumented names of other libraries that this program touches.

Each entry says why the name is used and what happens without it. ``lookup`` checks a name the first time it is asked
for, and returns None where the installed version lacks it or it behaves in another way: the caller then takes its
fallback. After an upgrade, ``tests/unit/test_compat.py`` says which entries broke.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf


@dataclass(frozen=True)
class PrivateName:
    """A name, why it is used, what happens without it, how to find it, and a small call that must succeed."""

    why: str
    fallback: str
    find: Callable[[], Any]
    works: Callable[[Any], bool]


@cache
def lookup(name: str) -> Any:
    """Return the object that ``name`` in ``REGISTER`` stands for, or None if it is missing or its check fails."""
    entry = REGISTER[name]
    try:
        found = entry.find()
        return found if entry.works(found) else None
    except Exception:  # whatever an upgrade may have changed: the fallback is right in any case
        return None


def functorch_active() -> bool:
    """Say whether this code runs inside a transform of ``torch.func`` (vmap, grad, jacrev, ...)."""
    active = lookup("torch._C._are_functorch_transforms_active")
    return bool(active()) if active else False


def config_path(node: DictConfig) -> str:
    """Return the dotted name of a node of the configuration, "" if it cannot be found out."""
    full_key = lookup("omegaconf.DictConfig._get_full_key")
    return str(full_key(node, None)) if full_key else ""


def _linear_pointwise_works(operator: Any) -> bool:
    x, weight, bias = torch.tensor([[2.0]]), torch.tensor([[-3.0], [3.0]]), torch.tensor([1.0, 1.0])
    return bool((operator(x, weight, bias, "relu", [], "") == torch.tensor([[0.0, 7.0]])).all())


def _channel_shuffle_works(shuffle: Any) -> bool:
    x = torch.arange(6.0).view(1, 6, 1, 1)
    return bool(torch.equal(shuffle(x, 2).flatten(), x.view(2, 3).t().flatten()))


def _threshold_backward_works(operator: Any) -> bool:
    grad, output = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 5.0])
    return bool(torch.equal(operator(grad, output, 0), torch.tensor([0.0, 2.0])))


def _bag_weights_backward_works(operator: Any) -> bool:
    grad, table = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    index, zero = torch.tensor([1, 0]), torch.tensor([0])
    return bool(torch.equal(operator(grad, table, index, zero, torch.tensor([0, 0]), 0), torch.tensor([17.0, 11.0])))


def _requirement_works(cache: Any) -> bool:
    here = cache("torch")
    return bool(here) and not bool(cache("no-such-package")) and here.requirement == "torch"


REGISTER = {
    "torch.ops.mkldnn._linear_pointwise": PrivateName(
        why="oneDNN's matrix product uses all of an AVX-512 processor; torch.mm calls MKL, which uses half of it",
        fallback="torch.mm",
        find=lambda: torch.ops.mkldnn._linear_pointwise.default,
        works=_linear_pointwise_works,
    ),
    "torch.native_channel_shuffle": PrivateName(
        why="transposes a matrix several times as fast as Tensor.contiguous",
        fallback="Tensor.contiguous",
        find=lambda: torch.native_channel_shuffle,
        works=_channel_shuffle_works,
    ),
    "torch.ops.aten.threshold_backward": PrivateName(
        why="relu's gradient in one pass, without a mask in memory",
        fallback="a mask, and a product with it",
        find=lambda: torch.ops.aten.threshold_backward,
        works=_threshold_backward_works,
    ),
    "torch.ops.aten._embedding_bag_per_sample_weights_backward": PrivateName(
        why="row-wise dot products of two gathered tables, without copies of the rows",
        fallback="two copies and a product",
        find=lambda: torch.ops.aten._embedding_bag_per_sample_weights_backward,
        works=_bag_weights_backward_works,
    ),
    "torch._C._are_functorch_transforms_active": PrivateName(
        why="torch.func cannot differentiate the fast functions, so they must know when it is at work",
        fallback="torch.func needs fast=false",
        find=lambda: torch._C._are_functorch_transforms_active,
        works=lambda active: isinstance(active(), bool),  # True where the first to ask is inside a transform
    ),
    "omegaconf.DictConfig._get_full_key": PrivateName(
        why="error messages name the section of the configuration that an option is in",
        fallback="messages without the section",
        find=lambda: DictConfig._get_full_key,
        works=lambda get: get(OmegaConf.create({"a": {"b": {}}}).a.b, None) == "a.b",
    ),
    "lightning_utilities.core.imports.RequirementCache": PrivateName(
        why="torchmetrics asks it whether transformers is installed, and if so imports it, which takes seconds",
        fallback="every run imports transformers wherever it is installed",
        find=lambda: importlib.import_module("lightning_utilities.core.imports").RequirementCache,
        works=_requirement_works,
    ),
}

# Operators that torchvision's Python code refers to while it is imported. If torchvision's compiled library does not
# fit the installed torch (a CUDA build beside a CPU torch), nobody has declared them: the import of torchvision fails,
# and with it that of torchmetrics and Lightning.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library: torch.library.Library | None = None  # the declarations live as long as this object


def prepare_imports() -> None:
    """Make torchvision, Lightning and torchmetrics importable; each package that imports one calls this."""
    _register_missing_operators()
    _import_torchmetrics()


def _register_missing_operators() -> None:
    """Declare the operators of torchvision that are missing; do nothing where it loads or is not installed.

    The declared operators can be traced but not called.
    """
    global _library
    if _library is not None or "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # the failed import left half of the package behind
        _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types for it
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                _library.define(name + schema)  # type: ignore[no-untyped-call]  # torch has no types for it


def _import_torchmetrics() -> None:
    """Import torchmetrics without ``transformers``, which only its metrics of generated texts need.

    This has to run before anything else imports torchmetrics, as Lightning does.
    """
    if "torchmetrics" in sys.modules or importlib.util.find_spec("transformers") is None:
        return
    requirement = lookup("lightning_utilities.core.imports.RequirementCache")
    if requirement is None:
        return
    is_met = requirement.__bool__
    requirement.__bool__ = lambda self: not str(self.requirement).startswith("transformers") and is_met(self)
    try:
        importlib.import_module("torchmetrics")
    finally:
        requirement.__bool__ = is_met
