"""Make a torchvision whose compiled operators cannot load importable."""

from __future__ import annotations

import torch

# Operators that torchvision's Python code refers to while it is imported. Where its compiled library does not
# fit the installed torch (a CUDA build beside a CPU torch), nobody has declared them, and the import of
# torchvision fails, and with it that of torchmetrics and Lightning.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library: torch.library.Library | None = None  # the declarations live as long as this object


def register_missing_operators() -> None:
    """Declare the operators of torchvision that are missing; do nothing where it loads or is not installed.

    Must run before the first import of torchvision; ``import mtl`` calls it. The declared operators can be
    traced but not called.
    """
    global _library
    import importlib.util
    import sys

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
