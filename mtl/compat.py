"""Get along with what is installed: a torchvision that cannot load, an allocator that forgets too soon."""

from __future__ import annotations

import ctypes

import torch

# mallopt's numbers (malloc.h): free memory at the end of the heap above which it is returned to the system, how much
# more than needed is asked for, and the size from which memory is mapped by itself
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT, _MAPPED = 2**31 - 1, 2**28  # bytes
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


def keep_freed_memory() -> None:
    """Let this process keep memory that it frees, for the next step to take; do nothing without glibc.

    By default each tensor of a few megabytes is a new mapping, whose pages the system clears at first touch: a
    fifth of a training step on a CPU. Tensors of 256 MiB and more are still returned; for the rest a process stays as
    large as it was at its largest.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for option, value in ((_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, 2**24), (_MMAP_THRESHOLD, _MAPPED)):
        mallopt(option, value)
