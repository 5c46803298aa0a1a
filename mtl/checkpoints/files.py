"""Read and write checkpoints: a damaged or dangerous one is refused wherever it is read."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch import Tensor

from mtl.checks import InputError, require
from mtl.config.trust import check_config
from mtl.writing import writing

log = logging.getLogger(__name__)

_LABEL = b"mtl-sha256:"
_SEAL = len(_LABEL) + 64  # bytes: the label and the digits


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write each checkpoint as ``writing`` does: a kill or a full disk leaves earlier files intact."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``; raise InputError if it cannot be written."""
        with writing(Path(path)) as file:
            torch.save(checkpoint, file)
            seal(file)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the checkpoint at ``path``; its configuration is not checked: the Trainer does not use it."""
        return read_whole(path)


def seal(file: Any) -> None:
    """Append the SHA-256 digest of a zip file, open for reading and writing, as the zip file's comment.

    The comment is part of the zip format, so ``torch.load`` and other programs still read the file.
    """
    file.flush()
    file.seek(-2, os.SEEK_END)
    if file.read(2) != b"\0\0":  # a zip file without comment ends with the comment's length
        raise RuntimeError("torch.save wrote a zip file that cannot take a checksum")
    file.seek(-2, os.SEEK_END)
    file.write(_SEAL.to_bytes(2, "little") + _LABEL)
    file.flush()
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0, os.SEEK_END)
    file.write(digest.encode())


def check_seal(path: Path) -> None:
    """Raise ValueError unless the file ends with its right checksum, InputError if it ends with none.

    Every damage is found: to the contents, to the zip file's directory and to the checksum itself. Raises ValueError
    also for files that are no zip file or whose members are compressed: torch does not compress, so it could only be
    meant to fill the memory.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(m.compress_type != zipfile.ZIP_STORED for m in members) or sum(m.file_size for m in members) > (
            path.stat().st_size
        ):
            raise ValueError("its members are larger than the file: this is no checkpoint but a zip bomb")
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _SEAL))
        end = file.read()
        if not end.startswith(_LABEL):
            raise InputError(f"checkpoint {path} was not written by this program: it has no checksum")
        file.seek(0)
        digest, left = hashlib.sha256(), size - 64
        while left:
            block = file.read(min(left, 1 << 20))
            digest.update(block)
            left -= len(block)
    if digest.hexdigest().encode() != end[-64:]:
        raise ValueError("its checksum is wrong")


def previous_checkpoint(path: str | Path) -> Path:
    """Return the path under which the predecessor of the checkpoint at ``path`` is kept."""
    path = Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def keep_previous(path: Path) -> None:
    """Keep the checkpoint at ``path`` under a second name, before a new one replaces it."""
    if path.exists():
        give_second_name(path, previous_checkpoint(path))


def give_second_name(path: Path, name: Path) -> None:
    """Make ``name`` the same file as ``path``, or a copy of it; a reader of ``name`` never sees a partial file."""
    if name.exists() and name.samefile(path):
        return
    temporary = name.with_name(f".{name.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
        temporary.replace(name)
    except OSError:  # a file system without hard links
        with path.open("rb") as source, writing(name) as copy:
            shutil.copyfileobj(source, copy)


class DamagedError(InputError):
    """A checkpoint is damaged; another one of the run may be intact."""


def whole_checkpoint(path: str | Path, trust: Sequence[str] = ()) -> Path:
    """Return ``path``, or, with a warning, the previous checkpoint if the one at ``path`` is damaged."""
    path = Path(path)
    try:
        read_checkpoint(path, trust)
    except DamagedError as error:
        previous = previous_checkpoint(path)
        if not previous.is_file():
            raise
        read_checkpoint(previous, trust)
        log.warning("%s; resuming from the previous checkpoint, %s", str(error).split(";")[0], previous)
        return previous
    return path


def read_checkpoint(path: str | Path, trust: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of a checkpoint of this program, whose configuration is safe to build.

    Raises InputError as ``read_whole`` does, and if the configuration names classes that neither this program nor the
    packages of ``trust`` contain.
    """
    checkpoint = read_whole(path)
    check_config(checkpoint["config"], trust, path)
    return checkpoint


def read_whole(path: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint of this program; its configuration may still name any class.

    Raises InputError if it is missing, damaged or not a checkpoint, or if a weight is NaN or infinite.
    """
    path = Path(path)
    require(path.is_file(), f"checkpoint {path}: no such file; give a .ckpt file, such as <run>/checkpoints/last.ckpt")
    try:
        check_seal(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # torch raises half a dozen kinds for damaged files
        raise DamagedError(_damage(path, error)) from None
    content: dict[str, Any] = checkpoint if isinstance(checkpoint, dict) else {}
    known = all(isinstance(content.get(key), Mapping) for key in ("config", "state_dict"))
    require(known, f"checkpoint {path} was not written by this program: it holds no configuration")
    bad = [
        str(name)
        for name, value in content["state_dict"].items()
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    require(not bad, f"checkpoint {path}: {len(bad)} weights are NaN or infinite, the first is {''.join(bad[:1])}")
    return content


def data_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the data module in a checkpoint; raise InputError if it has none."""
    state = checkpoint.get("data")
    if not isinstance(state, Mapping) or "spec" not in state:
        raise InputError("the checkpoint does not describe its data: this program did not write it")
    return dict(state)


def network_weights(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of the network in a checkpoint, by their names in the network."""
    weights = {name: value for name, value in checkpoint["state_dict"].items() if name.startswith("network.")}
    return {name.removeprefix("network."): value for name, value in weights.items()}


def _damage(path: Path, error: Exception) -> str:
    reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
    others = sorted(other.name for other in path.parent.glob("*.ckpt") if other != path)
    hint = f"; in the same folder: {', '.join(others[:8])}" if others else "; take another checkpoint of the run"
    return f"checkpoint {path} ({path.stat().st_size} bytes) is damaged or truncated ({reason}){hint}"
