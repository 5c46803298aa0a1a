"""Compose the configuration of a run that resumes or tests a checkpoint.

A checkpoint holds the resolved configuration of its run, and the overrides of its command line. A run that starts from
it is composed as a new one, from these overrides and then its own. Data, network, gate, weighting and, if it trains,
the optimiser are the checkpoint's; an override that would change them is refused. Files and servers come only from
``conf/`` and the command line, and classes are trusted ones, since the checkpoint may come from a stranger.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from mtl.checkpoints.files import Checkpoint
from mtl.checks import InputError, first_line, require
from mtl.config.patterns import with_columns
from mtl.config.portable import choices_among, is_data_location, is_portable, is_top
from mtl.data_modules.base import choose_batch_size
from mtl.files.run_files import flatten
from mtl.options import EnsembleSize, valid
from mtl.overrides import key_of, value_of

Composer = Callable[[Sequence[str]], DictConfig]

# The weights depend on these sections, so a run that starts from a checkpoint must not change them
FIXED_SECTIONS = ("gate", "network", "ensemble", "data", "permutation", "weighting")
UPDATE_SECTIONS = ("optimizer", "embedding_optimizer", "loss_reduction")
TRAINED_SECTIONS = (*FIXED_SECTIONS, *UPDATE_SECTIONS)  # of a run that goes on
OF_TRAINING = ("monitor", "test_checkpoint", "blend", "time_limit", "calibrate", "task_batches", "report")
UNREAD_IN_TESTS = (*UPDATE_SECTIONS, *OF_TRAINING)
# But it may change where data are and how their rows are loaded. The checkpoint holds the vocabularies and scales of
# the training and fingerprints of the files, so a changed file is noticed; for data.batch_size see ``check_batches``
FREE = r"data\.(data_dir|.*_url|download|pin_memory|(eval_)?batch_size|(tasks\.[^.]+\.)?(path|val_path|test_path))"
FREE_IN_TESTS = rf"{FREE}|data\.(split\.(by|column|gap)|csv\.separator|slices)"  # how another file is read
SPLIT = {"data.split.by", "data.split.column", "data.split.gap"}

MISSING: Any = object()


def stored_overrides(checkpoint: Checkpoint) -> list[str]:
    """Return the overrides of the run of ``checkpoint``. Raises InputError for one that this program never stores."""
    location, stored = f"checkpoint {checkpoint.path}", checkpoint["config"].get("overrides")
    overrides = valid(list[Any] | None, stored, f"{location}: overrides") or []
    harmful = [override for override in overrides if not isinstance(override, str) or not is_portable(override)]
    require(
        not harmful,
        f"{location} holds the override {str(harmful[:1])[1:81]}, which could name a class, a file or a server; this "
        "program stores no such overrides, so another one wrote it",
    )
    return list(overrides)


def group_overrides(checkpoint: Checkpoint, command_overrides: Sequence[str] = ()) -> list[str]:
    """Return those overrides of the run of ``checkpoint`` that choose from groups, set top-level options, or delete.

    Those that ``command_overrides`` replace are left out.
    """
    return choices_among(stored_overrides(checkpoint), command_overrides)


def use_installed_data(checkpoint: Checkpoint, installed: Mapping[str, str]) -> None:
    """Replace the override of the run of ``checkpoint`` that names a YAML file of the user's own for the data.

    It then names the file of ``conf/`` with the same class: ``installed`` has their names by class. The checkpoint has
    the values of all options, so the user's file is not needed. For a class of the user's own, nothing changes.
    """
    data = checkpoint["config"].get("data")
    name = installed.get(str(data.get("_target_"))) if isinstance(data, Mapping) else None
    if name is not None:
        choices = {f"data={other}" for other in installed.values()}
        overrides = stored_overrides(checkpoint)
        users = [text for text in overrides if key_of(text) == "data" and text not in choices]
        checkpoint["config"]["overrides"] = [f"data={name}" if text in users else text for text in overrides]


def resumed_config(
    checkpoint: Checkpoint,
    overrides: Sequence[str],
    compose: Composer,
    trust: Sequence[str] = (),
    evaluate: bool = False,
    options: Collection[str] = (),
) -> DictConfig:
    """Return the configuration of a run that starts from ``checkpoint``: of its run's overrides, then of ``overrides``.

    ``compose(overrides)`` returns the configuration of the installed ``conf/``; it sets further ``options`` itself.
    ``evaluate``: the run only tests. Network, gate, data, weighting and (unless ``evaluate``) optimizer are the
    checkpoint's. Raises InputError if the overrides would change them, or if the checkpoint names classes that are not
    trusted.
    """
    saved = checkpoint.config(trust)
    sections, free = (FIXED_SECTIONS, FREE_IN_TESTS) if evaluate else (TRAINED_SECTIONS, FREE)
    changed = {*(option for override in overrides for option in _values(override)), *options}
    if evaluate and "data.test_path" in changed:  # which has the rows; the options split the training's file
        changed |= SPLIT
    tasks: Any = saved["data"].get("tasks")
    named = tasks.items() if isinstance(tasks, dict) else ()
    columns = [str(task.get("column", name) if isinstance(task, dict) else name) for name, task in named]
    try:
        cfg = _composed(checkpoint, overrides, compose, {*options, *(changed & SPLIT)})
        before = _composed(checkpoint, (), compose)
        for composed in (cfg, before):
            with_columns(composed, columns)
        now, former = (flatten(_resolved(composed, sections)) for composed in (cfg, before))
        if evaluate:
            unread = [name for name in UNREAD_IN_TESTS if _resolved(cfg, [name]) != _resolved(before, [name])]
            require(not unread, f"{', '.join(unread)}: without effect on a test, which trains nothing; leave this out")
        changed |= {key for key in now.keys() | former.keys() if now.get(key) != former.get(key)}
        fixed = {
            section: _merged(section, node, saved.get(section), tuple(f"{key}." for key in changed))
            for section, node in _resolved(cfg, sections).items()
        }
    except OmegaConfBaseException as error:
        raise InputError(first_line(error)) from None
    if wrong := _differences(saved, fixed, sections, free):
        advice = "Leave these options out to use the checkpoint's, or start a new run"
        raise InputError(f"checkpoint {checkpoint.path} has a different configuration: {'; '.join(wrong)}. {advice}")
    keys = set(map(key_of, overrides))
    with open_dict(cfg):
        cfg.update(fixed)
        cfg.overrides = [override for override in stored_overrides(checkpoint) if key_of(override) not in keys]
        cfg.overrides += [override for override in overrides if is_portable(override)]
    return cfg


def _composed(
    checkpoint: Checkpoint, overrides: Sequence[str], compose: Composer, skipped: Collection[str] = ()
) -> DictConfig:
    """Compose the choices of the run of ``checkpoint`` and ``overrides``, then set all other options, the run's first.

    An option is left out if the choices have none of this name, or if it is in ``skipped``; one of the run's, also if
    another choice of ``overrides`` has another default for it, such as ``trainer.devices`` with ``trainer=ddp_cpu``.
    """
    cfg, replaced = compose([*group_overrides(checkpoint, overrides), *overrides]), set[str]()
    if not set(map(key_of, overrides)).isdisjoint(cfg.get("choices") or ()):
        former, chosen = (flatten(OmegaConf.to_container(c)) for c in (compose(group_overrides(checkpoint)), cfg))
        replaced = {option for option in chosen if former.get(option) != chosen[option]}
    stored = stored_overrides(checkpoint)
    for override in (*stored, *overrides):
        for option, value in _values(override).items():
            section, _, name = option.rpartition(".")
            node = OmegaConf.select(cfg, section)
            is_there = OmegaConf.is_dict(node) and (name in {*node} or override.startswith("+"))
            if is_there and option not in skipped and not (override in stored and option in replaced):
                OmegaConf.update(cfg, option, value, force_add=True)
    return cfg


def _resolved(cfg: DictConfig, sections: Iterable[str]) -> dict[str, Any]:
    """Return ``sections`` of ``cfg`` with all references resolved."""
    nodes = {section: cfg.get(section) for section in sections}
    return {
        section: OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        for section, node in nodes.items()
    }


def _values(override: str) -> dict[str, Any]:
    """Return the options in sections that ``override`` sets: of a dict those in it, but in ``data``, as tasks, all."""
    key, value = key_of(override), value_of(override)
    is_in_checkpoint = (key, value) == ("network.config", None)  # which describes the whole encoder
    if override.startswith("~") or is_top(key) or is_in_checkpoint:
        return {}
    return flatten(value, key) if isinstance(value, dict) and not key.startswith("data.") else {key: value}


def _merged(key: str, now: Any, saved: Any, changed: tuple[str, ...]) -> Any:
    """Return the value at ``key``: as ``saved``, but as ``now`` under ``changed`` keys, and where it locates data."""
    if is_data_location(key) or f"{key}.".startswith(changed):
        return now
    if isinstance(now, dict) and isinstance(saved, dict):
        nodes = {n: (now.get(n, MISSING), saved.get(n, MISSING)) for n in {**now, **saved}}
        children = {n: _merged(f"{key}.{n}", *pair, changed) for n, pair in nodes.items()}
        return {n: child for n, child in children.items() if child is not MISSING}
    return saved


def _differences(saved: Mapping[str, Any], new: Mapping[str, Any], sections: Sequence[str], free: str) -> list[str]:
    """Return a phrase for each value of ``sections`` that differs, except under keys that match ``free``."""
    lines = []
    for section in sections:
        before, now = (flatten(config.get(section), section) for config in (saved, new))
        keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        keys = [key for key in keys if not re.fullmatch(free, key)]
        if f"{section}._target_" in keys:  # options of different classes need not be compared
            keys = [f"{section}._target_"]
        keys = [key for key in keys if not key.startswith(("network.gate.", "network.permutation."))]  # same as gate
        lines += [f"{key} is {before.get(key)} in the checkpoint, {now.get(key)} now" for key in keys]
    return lines[:4] + ([f"and {len(lines) - 4} more"] if len(lines) > 4 else [])


def check_batches(checkpoint: Checkpoint, batch_size: int | str, processes: int) -> None:
    """Raise InputError if a run resumed with ``processes`` processes would have batches of another size than before.

    ``batch_size``: rows per process, or "auto". Within an epoch, batches of another size would also repeat or skip
    rows.
    """
    before, size = len(checkpoint.get("epoch_sums", ())), checkpoint["config"]["data"].get("batch_size")
    counts = checkpoint.get("data", {}).get("rows", {}).get("train", 0)
    automatic = choose_batch_size(sum(counts.values()) if isinstance(counts, Mapping) else counts)  # of all processes
    if not before or size is None:
        return
    rows, now = (
        count * (number if isinstance(number, int) else max(1, automatic // count))
        for number, count in ((size, before), (batch_size, processes))
    )
    if rows == now:
        return
    advice = f"to go on with these, give data.batch_size={rows // processes}"
    if rows % processes:
        advice = f"they cannot be divided equally, so resume with {before} processes"
    raise InputError(
        f"data.batch_size={batch_size} in {processes} process{'es' if processes > 1 else ''} makes batches of {now} "
        f"rows, and the run that is resumed has batches of {rows} ({size} in each of {before}): {advice}"
    )


def config_to_load(checkpoint: Checkpoint, trust: Sequence[str] = (), data_dir: str | None = None) -> DictConfig:
    """Return the part of a checkpoint's configuration that builds its data and network, without training.

    Data are read from ``data_dir``, by default as for ``paths.data_dir``, and fetched from the data modules' addresses.
    """
    config = checkpoint.config(trust)
    data = {key: value for key, value in config["data"].items() if not key.endswith("_url")}
    if "data_dir" in data:
        data["data_dir"] = data_dir or os.environ.get("MTL_DATA_DIR", "data")
    members = valid(EnsembleSize, config.get("ensemble", 1), f"checkpoint {checkpoint.path}: ensemble")
    return OmegaConf.create({"compile": False, "network": config["network"], "ensemble": members, "data": data})
