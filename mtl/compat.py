"""Make torchvision, Lightning and torchmetrics importable, and quickly; ``import mtl`` calls the two public functions.

``tests/unit/test_compat.py`` lists the private names of other libraries that this program uses.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Operators that torchvision's Python code refers to while it is imported. If torchvision's compiled library does not
# fit the installed torch (a CUDA build beside a CPU torch), nobody has declared them: the import of torchvision fails,
# and with it that of torchmetrics and Lightning.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # how long OpenMP's threads spin before they sleep
_LIBRARIES: list[Any] = []  # the declarations live as long as these objects
# What torchmetrics imports for metrics of generated texts, for an alias in scipy and for plots
_SLOW = ("transformers", "scipy", "matplotlib")


def prepare_imports() -> None:
    """Patch the import of torchvision and torchmetrics, whichever module imports them first."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def shorten_spinning() -> None:
    """Let the threads of GNU's OpenMP, which torch uses on Linux, sleep soon while they wait, unless the user decides.

    By default they spin for milliseconds, which takes a processor from whatever else could run on it: beside busy
    processes, a training step then takes many times as long. To sleep at once (``OMP_WAIT_POLICY=PASSIVE``) costs small
    operations up to half of their speed on a quiet machine; a short spin costs nothing that could be measured, see
    benchmarks/waiting_threads.py. OpenMP reads the variable when torch is loaded; later it would have no effect.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "80000")


class _Finder(MetaPathFinder):
    """Find the packages of ``_EXECUTE`` as Python does, and let the function there execute their code."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _EXECUTE or self._searching:
            return None
        self._searching = True  # the other finders answer now
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute, exec_module = _EXECUTE[name], spec.loader.exec_module
            spec.loader.exec_module = lambda module: execute(exec_module, module)  # type: ignore[method-assign]
        return spec


def _execute_torchvision(exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute torchvision; if its compiled library does not load, declare the operators that are missing first.

    The declared operators can be traced but not called.
    """
    try:
        exec_module(module)
    except RuntimeError:
        import torch

        for name in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[name]  # remove the partly imported package
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(name + schema)
        _LIBRARIES.append(library)
        exec_module(module)


def _execute_torchmetrics(exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute torchmetrics as if the packages ``_SLOW`` were not installed; its plots import matplotlib when drawn."""
    imports: Any = importlib.import_module("lightning_utilities.core.imports")
    requirement, package_available = imports.RequirementCache, imports.package_available
    is_met = requirement.__bool__
    requirement.__bool__ = lambda self: not str(self.requirement).startswith(_SLOW) and is_met(self)
    imports.package_available = lambda name: name not in _SLOW and package_available(name)
    try:
        exec_module(module)
    finally:
        requirement.__bool__, imports.package_available = is_met, package_available
    plot: Any = sys.modules["torchmetrics.utilities.plot"]
    plot.plt = imports.lazy_import("matplotlib.pyplot")


_EXECUTE = {"torchvision": _execute_torchvision, "torchmetrics": _execute_torchmetrics}
