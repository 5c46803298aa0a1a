"""Read and write checkpoints; damaged or dangerous ones are refused."""

from __future__ import annotations

import logging
import math
import os
import shutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch import Tensor

from mtl.checkpoints.safetensors_weights import read_plain
from mtl.checkpoints.shards import Parts, check_zip, joined, read_shards
from mtl.checkpoints.trust import check_config
from mtl.checks import InputError, first_line, require
from mtl.files.run_files import checked_file, find_checkpoint, is_plain
from mtl.files.writing import writing
from mtl.nn.calibration import Calibration
from mtl.options import StrictModel, options_of, sentences, valid
from mtl.types import DataSpec

log = logging.getLogger(__name__)

# Functions of torch and Lightning that restore the content of a checkpoint
RESTORING = {"load_state_dict", "_restore_modules_and_callbacks", "resume_start", "restore_training_state"}


class DamagedError(InputError):
    """A checkpoint is damaged; another one of the run may be intact."""


class Content(StrictModel, extra="ignore"):
    """The entries of a checkpoint that this program reads; Lightning reads the others, see ``restoring``."""

    config: dict[str, Any]
    state_dict: dict[str, Any]
    data: dict[str, Any] = Field(default_factory=dict)
    epoch_sums: list[Any] = Field(default_factory=list)
    calibration: dict[str, dict[str, Any]] = Field(default_factory=dict)
    blend: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = Field(default_factory=dict)
    model: str = ""
    parts: Parts | None = None


class Checkpoint(dict[str, Any]):
    """The content of the checkpoint at ``path``, as Lightning and the callbacks wrote it."""

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        super().__init__(content)
        self.path = path

    def config(self, trust: Sequence[str] = ()) -> dict[str, Any]:
        """Return the resolved configuration of the run, which is safe to build.

        Raises InputError if it names classes that neither this program nor the packages of ``trust`` contain.
        """
        check_config(self["config"], trust, self.path)
        return dict(self["config"])

    def data(self) -> dict[str, Any]:
        """Return the state of the data module; raise InputError if there is none."""
        state = self.get("data")
        if not isinstance(state, Mapping) or "spec" not in state:
            raise InputError(f"checkpoint {self.path} does not describe its data: this program did not write it")
        return dict(state)

    def weights(self) -> dict[str, Any]:
        """Return the weights of the network by their names in the network."""
        names = [name for name in self["state_dict"] if str(name).startswith("network.")]
        return {name.removeprefix("network."): self["state_dict"][name] for name in names}

    def calibrated(self, spec: DataSpec) -> DataSpec:
        """Return ``spec`` with the calibrations of its tasks that belong to the weights; see ``put_after_training``."""
        kinds, calibrations = options_of(Calibration.__init__), dict[str, Calibration]()
        for task, stored in (self.get("calibration") or {}).items():
            location = f"checkpoint {self.path}: calibration.{task}"
            values = {name: valid(kind, stored.get(name), location) for name, kind in kinds.items()}
            calibrations[task] = Calibration(**values)
        return replace(spec, tasks=[replace(task, calibration=calibrations.get(task.name)) for task in spec.tasks])


@contextmanager
def restoring(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Raise InputError if the network, the optimizer or Lightning cannot restore its state from ``checkpoint``.

    Other errors inside the context are not changed.
    """
    try:
        yield
    except InputError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        restores = any(frame.name in RESTORING for frame in frames)
        if checkpoint is None or not restores:
            raise
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"checkpoint {checkpoint.path} does not hold what its run needs ({type(error).__name__}: {reason}); take "
            "another checkpoint of the run"
        ) from error


class CheckpointIO(TorchCheckpointIO):
    """Write each checkpoint atomically (see ``mtl.files.writing``): a kill or a full disk leaves earlier files intact.

    ``start_checkpoint``: the one that the run starts from, which is not read again.
    """

    def __init__(self, start_checkpoint: Checkpoint | None = None) -> None:
        self.start_checkpoint = start_checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``; raise InputError if it cannot be written."""
        with writing(Path(path)) as file:
            torch.save(dict(checkpoint), file)

    def load_checkpoint(self, path: str | Path, *args: Any, sharded: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return the checkpoint at ``path``; its configuration, which the Trainer does not use, is not checked.

        ``sharded``: tensors that processes divided may be ``RowShards``.
        """
        start, self.start_checkpoint = self.start_checkpoint, None
        content = start if start is not None and start.path == Path(path) else read(path, sharded=True)
        return content if sharded else joined(content)


def put_after_training(path: Path, **entries: Any) -> None:
    """Write what was learnt after the training, plain data and tensors, into the checkpoint at ``path``."""
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # divided tensors stay in their files
    if any(value or content.get(name) for name, value in entries.items()):
        CheckpointIO().save_checkpoint({**content, **entries}, path)


def read(path: str | Path, name: str = "best", sharded: bool = False) -> Checkpoint:
    """Return the checkpoint that ``find_checkpoint`` finds; ``Checkpoint.config`` checks its configuration.

    ``sharded``: tensors that processes divided may be ``RowShards``.
    Raises InputError if it is missing, damaged or not a checkpoint, or if a weight is NaN or infinite.
    """
    path = find_checkpoint(path, name)
    plain = is_plain(path)
    try:
        if not plain:
            check_zip(path)
        # Values are read when used
        content = read_plain(path) if plain else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except InputError:
        raise
    except Exception as error:  # torch raises half a dozen kinds for damaged files
        raise DamagedError(_damage(path, error)) from None
    try:
        Content.model_validate(content)
        content = read_shards(content, path)
        content = content if sharded else joined(content)
        bad = [str(name) for name, value in content["state_dict"].items() if not _finite(value)]
    except ValidationError as error:
        problem = sentences(error, Content, "", content)[0]
        raise InputError(f"checkpoint {path} was not written by this program: {problem}") from None
    except InputError:
        raise
    except Exception as error:  # of torch, for a damaged part or tensor
        raise DamagedError(_damage(path, error)) from None
    require(not bad, f"checkpoint {path}: {len(bad)} weights are NaN or infinite, the first is {''.join(bad[:1])}")
    return Checkpoint(content, path)


@contextmanager
def using(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise InputError for an error inside this context, which builds objects from what ``checkpoint`` says."""
    try:
        yield
    except InputError as error:
        named = str(checkpoint.path) in str(error)
        raise InputError(str(error) if named else f"checkpoint {checkpoint.path}: {error}") from error
    except Exception as error:  # a forged state can make any code raise anything
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise InputError(f"checkpoint {checkpoint.path} is damaged or not of this program ({reason})") from error


def _finite(values: Any) -> bool:
    """Return whether ``values``, if they are a tensor, are finite, without the copies that ``isfinite`` makes.

    ``RowShards`` are not read: each process will use only its part of them.
    """
    if isinstance(values, Tensor) and (values.is_complex() or values.is_quantized or values.layout != torch.strided):
        raise ValueError(f"a weight is {values.dtype}, {values.layout}")
    if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel():
        return True
    return all(bool(end.isfinite()) for end in torch.aminmax(values))  # either is NaN if a value is


def read_to_resume(path: str | Path) -> Checkpoint:
    """Return the last checkpoint at ``path`` or, with a warning, its predecessor if it is damaged.

    Tensors that processes divided may be ``RowShards``.
    """
    path = find_checkpoint(path, "last")
    try:
        return read(path, sharded=True)
    except DamagedError as error:
        previous = previous_checkpoint(path)
        if not previous.is_file():
            raise
        checkpoint = read(checked_file(previous, path.parent, math.inf), sharded=True)
        log.warning("%s; resuming from the previous checkpoint, %s", str(error).split(";")[0], previous)
        return checkpoint


def _damage(path: Path, error: Exception) -> str:
    reason = first_line(error).split(". ")[0]
    siblings = sorted(other.name for other in path.parent.glob("*.ckpt") if other != path)
    hint = f"; in the same folder: {', '.join(siblings[:8])}" if siblings else "; take another checkpoint of the run"
    return f"checkpoint {path} ({path.stat().st_size} bytes) is damaged or truncated ({reason}){hint}"


def previous_checkpoint(path: str | Path) -> Path:
    """Return the path under which the predecessor of the checkpoint at ``path`` is kept."""
    path = Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def keep_previous(path: Path) -> None:
    """Keep the checkpoint at ``path`` under a second name, before a new one replaces it.

    A reader of the second name never sees a partial file.
    """
    name = previous_checkpoint(path)
    if not path.exists() or (name.exists() and name.samefile(path)):
        return
    temporary = name.with_name(f".{name.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
        temporary.replace(name)
    except OSError:  # a file system without hard links
        with path.open("rb") as source, writing(name) as copy:
            shutil.copyfileobj(source, copy)
