"""Keep memory that the process frees, instead of returning it to the system and clearing its pages again."""

from __future__ import annotations

import ctypes

# mallopt's parameters (malloc.h): above how many free bytes the heap is trimmed, how much more than needed is asked
# for, and from which size a block is mapped on its own
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT, _MAPPED = 2**31 - 1, 2**28  # bytes


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step; do nothing where there is no glibc.

    By default each tensor of a few megabytes is a new mapping, whose pages the system clears at first touch: a fifth
    of a dense training step on a CPU. Tensors of 256 MiB and more are still returned to the system. For the rest, the
    process stays as large as it was at its largest.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for option, value in ((_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, 2**24), (_MMAP_THRESHOLD, _MAPPED)):
        mallopt(option, value)
