"""Read checkpoints, and decide which configuration a run that starts from one has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from mtl.types import InputError, require

# What the weights in a checkpoint are a function of: a run that starts from it must agree in these sections,
FIXED_SECTIONS = ("gate", "network", "data")
# but for where the files are and how they are fed.
FREE_KEYS = {"data.data_dir", "data.download", "data.base_url", "data.eval_batch_size", "data.pin_memory"}


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
    ``overrides`` the words given, ``groups`` the names of config groups. Raise InputError where the command line
    asks for another network, gate or data than the checkpoint's.
    """
    saved = OmegaConf.create(read_checkpoint(path)["config"])
    assert isinstance(saved, DictConfig)
    merged = saved.copy()
    given = [word.lstrip("+~").split("=")[0].split("@")[0] for word in overrides]
    with open_dict(merged):
        for key in [*given, "paths", "ckpt", "evaluate"]:
            value = OmegaConf.select(cfg, key)
            if key in groups and key != "experiment":
                merged[key] = value
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
    def walk(prefix: str, node: Any) -> dict[str, Any]:
        if not isinstance(node, dict):
            return {prefix: node}
        return {key: value for name, child in node.items() for key, value in walk(f"{prefix}.{name}", child).items()}

    node = cfg.get(section)
    return walk(section, OmegaConf.to_container(node, resolve=True)) if node is not None else {}
