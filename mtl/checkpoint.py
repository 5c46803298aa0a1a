"""Read checkpoints, and decide which configuration a run that starts from one has."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from pytorch_lightning.plugins.io import TorchCheckpointIO

from mtl.types import InputError, require

log = logging.getLogger(__name__)

# What the weights in a checkpoint are a function of: a run that starts from it must agree in these sections,
FIXED_SECTIONS = ("gate", "network", "data")
# but for where the files are and how they are fed.
FREE_KEYS = {
    f"data.{name}"
    for name in (
        *("data_dir", "download", "base_url", "mnist_url", "svhn_url", "workers"),
        *("eval_batch_size", "pin_memory"),
    )
}

# The sections that a config group fills, where these are others than the section of its own name.
SECTIONS = {"recipe": ("setting", "experts")}
# Keys that had other names in checkpoints of earlier versions.
RENAMED = {"setting.experts": "experts", "setting.find_unused_parameters": "task_batches"}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint beside its place and rename it.

    A process that is killed, or a disk that is full, leaves the earlier files as they are.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``; InputError when it cannot be written."""
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
            kept = f"; {path} is the one of before, whole" if path.exists() else ""
            raise InputError(f"checkpoint {path} cannot be written: {reason}{kept}") from None
        finally:
            temporary.unlink(missing_ok=True)


def previous_checkpoint(path: str | Path) -> Path:
    """Return where the checkpoint before the one at ``path`` is kept."""
    path = Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def keep_previous(path: Path) -> None:
    """Give the checkpoint at ``path`` a second name, under which it stays when a new one takes its place."""
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
    """Return ``path``, or, where that file is damaged, the one before it if that is whole, and say so."""
    path, previous = Path(path), previous_checkpoint(path)
    try:
        read_checkpoint(path)
    except InputError as error:
        if not previous.is_file():
            raise
        read_checkpoint(previous)
        log.warning("%s; going on with the one before it, %s", str(error).split(";")[0], previous)
        return previous
    return path


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint of this program; InputError where there is none or it is damaged."""
    path = Path(path)
    require(
        path.is_file(), f"checkpoint {path}: no such file; accepted is a .ckpt file, as in <run>/checkpoints/last.ckpt"
    )
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
    return dict(checkpoint)


def config_from_checkpoint(cfg: DictConfig, path: str, overrides: Sequence[str], groups: Sequence[str]) -> DictConfig:
    """Return the configuration of a run that starts from the checkpoint at ``path``.

    It is the checkpoint's own configuration with the user's command line on top: ``cfg`` is what Hydra composed,
    ``overrides`` the words given, ``groups`` the names of config groups. A group's name replaces the section of that
    name; ``recipe`` replaces the sections ``setting`` and ``experts``. Raise InputError where the command line asks for
    another network, gate or data than the checkpoint's.
    """
    saved = OmegaConf.create(_with_new_names(read_checkpoint(path)["config"]))
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
        f"checkpoint {path} is of another configuration: {'; '.join(wrong)}. Leave these words away to go on with "
        "the checkpoint's, or start a new run without it",
    )
    OmegaConf.set_struct(merged, True)
    return merged


def _with_new_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration in a checkpoint with the keys and references that ``RENAMED`` lists under new names."""
    config = {**config, "setting": {"convolutions": [], **config.get("setting", {})}}
    references = {}
    for old, new in RENAMED.items():
        name = old.removeprefix("setting.")
        if name in config["setting"]:
            config[new] = config["setting"].pop(name)
            references[f"${{{old}}}"] = f"${{{new}}}"
    renamed = _replace_strings(config, references)
    assert isinstance(renamed, dict)
    return renamed


def _replace_strings(node: Any, new: Mapping[str, str]) -> Any:
    """Return nested dicts and lists with every string that is a key of ``new`` replaced by its value."""
    if isinstance(node, dict):
        return {key: _replace_strings(child, new) for key, child in node.items()}
    if isinstance(node, list):
        return [_replace_strings(child, new) for child in node]
    return new.get(node, node) if isinstance(node, str) else node


def _differences(saved: DictConfig, given: DictConfig) -> list[str]:
    lines = []
    for section in FIXED_SECTIONS:
        old, new = _flat(saved, section), _flat(given, section)
        keys = sorted(key for key in old.keys() | new.keys() if key not in FREE_KEYS and old.get(key) != new.get(key))
        if f"{section}._target_" in keys:  # of another class, the options differ anyway
            keys = [f"{section}._target_"]
        keys = [key for key in keys if not key.startswith("network.gate.")]  # a reference to the gate section
        lines += [f"{key} is {old.get(key)} in the checkpoint, {new.get(key)} given" for key in keys]
    return lines[:4] + ([f"and {len(lines) - 4} more"] if len(lines) > 4 else [])


def _flat(cfg: DictConfig, section: str) -> dict[str, Any]:
    node = cfg.get(section)
    return flatten(OmegaConf.to_container(node, resolve=True), section) if node is not None else {}


def resolved(config: Any) -> Any:
    """Return the configuration that a module carries with every reference replaced by its value."""
    return OmegaConf.to_container(OmegaConf.create(config), resolve=True)


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by their dotted names."""
    if not isinstance(node, dict):
        return {prefix: node}
    parts = [flatten(child, f"{prefix}.{name}" if prefix else str(name)) for name, child in node.items()]
    return {key: value for part in parts for key, value in part.items()}
