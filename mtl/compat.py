"""Make torchvision, Lightning and torchmetrics importable, and quickly.

``tests/unit/test_compat.py`` lists the private names of other libraries that this program uses.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

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
            del sys.modules[name]  # remove the partly imported package
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                _library.define(name + schema)


def _import_torchmetrics() -> None:
    """Import torchmetrics without ``transformers``, which only its metrics of generated texts need.

    This has to run before anything else imports torchmetrics, as Lightning does.
    """
    if "torchmetrics" in sys.modules or importlib.util.find_spec("transformers") is None:
        return
    requirement = importlib.import_module("lightning_utilities.core.imports").RequirementCache
    is_met = requirement.__bool__
    requirement.__bool__ = lambda self: not str(self.requirement).startswith("transformers") and is_met(self)
    try:
        importlib.import_module("torchmetrics")
    finally:
        requirement.__bool__ = is_met
