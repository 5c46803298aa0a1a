"""Say in one sentence that another process of the run is gone; Lightning's strategies wait for 30 minutes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mtl.checks import InputError, causes

# Error messages of torch.distributed when another process is gone: of gloo, its store, NCCL
MESSAGES = (
    "Broken pipe",
    "Connection closed by peer",
    "Connection refused",
    "Connection reset by peer",
    "NCCL communicator was aborted",
    "Socket Timeout",
    "Timed out waiting",
    "failed to recv, got 0 bytes",
    "ncclRemoteError",
)


@contextmanager
def lost_peers_reported(action: str, command: str) -> Iterator[None]:
    """Raise InputError if another process ends inside the block or does not answer.

    The message says with which ``command`` the user can do the ``action``, such as "resume".
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        happened = "has not answered in time" if "Timed out" in str(error) else "has ended"
        raise InputError(f"another process of this run {happened}; {action} with: {command}") from error


def is_lost_peer(error: BaseException) -> bool:
    """Return whether ``error`` says that another process of the run is gone."""
    kinds = (RuntimeError, ConnectionError)
    return any(isinstance(cause, kinds) and any(text in str(cause) for text in MESSAGES) for cause in causes(error))
