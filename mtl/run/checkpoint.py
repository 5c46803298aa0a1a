"""Read and write checkpoints, and build the configuration of a run that starts from one."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from pytorch_lightning.plugins.io import TorchCheckpointIO

from mtl.run.upgrade import upgrade
from mtl.types import InputError, require

log = logging.getLogger(__name__)

# The weights depend on these sections, so a run that starts from a checkpoint must not change them,
FIXED_SECTIONS = ("gate", "network", "data")
# except for these keys, which say where files are and how rows are loaded, and keys that end with _url.
FREE_KEYS = {f"data.{name}" for name in ("data_dir", "download", "workers", "eval_batch_size", "pin_memory")}

# Config groups that fill other sections than the one of their own name
SECTIONS = {"recipe": ("setting", "experts")}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write each checkpoint to a temporary file and rename it: a kill or a full disk leaves earlier files intact."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``; raise InputError if it cannot be written."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
            full = getattr(error, "errno", None) == errno.ENOSPC or shutil.disk_usage(path.parent).free < 2**20
            reason = "no space left on the device" if full else str(error).splitlines()[0]
            kept = f"; the previous {path} is intact" if path.exists() else ""
            raise InputError(f"checkpoint {path} cannot be written: {reason}{kept}") from None
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the checkpoint at ``path``, converted if an earlier version of this program wrote it."""
        return upgrade(dict(super().load_checkpoint(path, *args, **kwargs)))


def previous_checkpoint(path: str | Path) -> Path:
    """Return the path under which the predecessor of the checkpoint at ``path`` is kept."""
    path = Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def keep_previous(path: Path) -> None:
    """Keep the checkpoint at ``path`` under a second name, before a new one replaces it."""
    if not path.exists():
        return
    previous = previous_checkpoint(path)
    link = previous.with_name(f".{previous.name}.{os.getpid()}")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, link)
    link.replace(previous)


def whole_checkpoint(path: str | Path) -> Path:
    """Return ``path``, or, with a warning, the previous checkpoint if the one at ``path`` is damaged."""
    path, previous = Path(path), previous_checkpoint(path)
    try:
        read_checkpoint(path)
    except InputError as error:
        if not previous.is_file():
            raise
        read_checkpoint(previous)
        log.warning("%s; resuming from the previous checkpoint, %s", str(error).split(";")[0], previous)
        return previous
    return path


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint of this program; raise InputError if it is missing or damaged."""
    path = Path(path)
    require(path.is_file(), f"checkpoint {path}: no such file; give a .ckpt file, such as <run>/checkpoints/last.ckpt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for damaged files
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        others = sorted(other.name for other in path.parent.glob("*.ckpt") if other != path)
        hint = f"; in the same folder: {', '.join(others)}" if others else "; take another checkpoint of the run"
        size = path.stat().st_size
        raise InputError(f"checkpoint {path} ({size} bytes) is damaged or truncated ({reason}){hint}") from None
    known = isinstance(checkpoint, dict) and {"config", "state_dict"} <= checkpoint.keys()
    require(known, f"checkpoint {path} was not written by this program: it holds no configuration")
    return upgrade(dict(checkpoint))


def config_from_checkpoint(cfg: DictConfig, path: str, overrides: Sequence[str], groups: Sequence[str]) -> DictConfig:
    """Return the configuration of a run that starts from the checkpoint at ``path``.

    This is the checkpoint's own configuration, with the command line applied on top. ``cfg``: the configuration that
    Hydra composed; ``overrides``: the arguments on the command line; ``groups``: the names of the config groups. An
    argument that selects a group replaces the section of that name; ``recipe`` replaces the sections ``setting`` and
    ``experts``. Raises InputError if the command line asks for another network, gate or data than the checkpoint's.
    """
    saved = OmegaConf.create(read_checkpoint(path)["config"])
    assert isinstance(saved, DictConfig)
    merged = saved.copy()
    given = [word.lstrip("+~").split("=")[0].split("@")[0] for word in overrides]
    with open_dict(merged):
        for key in [*given, "paths", "ckpt", "evaluate"]:
            value = OmegaConf.select(cfg, key)
            if key in groups and key != "experiment":
                for section in SECTIONS.get(key, (key,)):
                    merged[section] = OmegaConf.select(cfg, section)
            elif value is not None or key in ("ckpt", "evaluate"):
                OmegaConf.update(merged, key, value, merge=False)
    wrong = _differences(saved, merged)
    require(
        not wrong,
        f"checkpoint {path} has a different configuration: {'; '.join(wrong)}. Leave these options out to use the "
        "checkpoint's, or start a new run without it",
    )
    OmegaConf.set_struct(merged, True)
    return merged


def _differences(saved: DictConfig, given: DictConfig) -> list[str]:
    lines = []
    for section in FIXED_SECTIONS:
        old, new = _flat(saved, section), _flat(given, section)
        keys = sorted(key for key in old.keys() | new.keys() if not _is_free(key) and old.get(key) != new.get(key))
        if f"{section}._target_" in keys:  # options of different classes need not be compared
            keys = [f"{section}._target_"]
        keys = [key for key in keys if not key.startswith("network.gate.")]  # only refers to the section gate
        lines += [f"{key} is {old.get(key)} in the checkpoint, {new.get(key)} given" for key in keys]
    return lines[:4] + ([f"and {len(lines) - 4} more"] if len(lines) > 4 else [])


def _is_free(key: str) -> bool:
    return key in FREE_KEYS or key.endswith("_url")


def _flat(cfg: DictConfig, section: str) -> dict[str, Any]:
    node = cfg.get(section)
    return flatten(OmegaConf.to_container(node, resolve=True), section) if node is not None else {}


def resolved(config: Any) -> Any:
    """Return a module's configuration with every interpolation replaced by its value."""
    return OmegaConf.to_container(OmegaConf.create(config), resolve=True)


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by their dotted names."""
    if not isinstance(node, dict):
        return {prefix: node}
    parts = [flatten(child, f"{prefix}.{name}" if prefix else str(name)) for name, child in node.items()]
    return {key: value for part in parts for key, value in part.items()}
