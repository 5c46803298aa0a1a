"""Compose the configuration of a run that resumes or tests a checkpoint.

A checkpoint holds the words of its run's command line and the resolved configuration. A run that starts from it
composes ``conf/`` with those words and its own, so references between options work as in any run. Every option that the
weights depend on must then equal the checkpoint's, even if files of ``conf/`` have changed. Classes, files and servers
come only from ``conf/`` and the command line, since the checkpoint may come from a stranger.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtl import __version__
from mtl.checkpoints.files import Checkpoint
from mtl.checkpoints.trust import BUILT, is_installed
from mtl.checks import InputError, first_line, require
from mtl.files.records import flatten
from mtl.options import valid
from mtl.runs.commands import key_of

Composer = Callable[[Sequence[str]], DictConfig]

# The weights depend on these sections, so a run that starts from a checkpoint must not change them
FIXED_SECTIONS = ("gate", "network", "data", "permutation", "weighting")
# It may change these keys, which say where files are and how rows are loaded, and keys that end with _url
FREE_KEYS = {f"data.{name}" for name in ("data_dir", "download", "eval_batch_size", "pin_memory")}
FREE_KEYS.add("data.batch_size")  # for another number of processes, see ``check_batches``
# The files of the user's tables and texts. The checkpoint holds the vocabularies and scales of the training and
# fingerprints of the files, so a changed file is noticed
FILES = re.compile(r"data\.(tasks\.[^.]+\.)?(path|val_path|test_path)")
TEST_FILES = re.compile(FILES.pattern + r"|data\.(split_column|separator)")  # how they are read

LOCAL = ("ckpt", "evaluate", "trust", "changed_data", "paths", "hydra")  # options of one command, not of its run
OBJECTS = ("callbacks", "logger", "trainer")  # their texts may name files and servers, except under these keys:
NAMES = (
    *("accelerator", "devices", "gradient_clip_algorithm", "max_time", "mode", "monitor"),
    *("precision", "shape", "target"),
)
TEXTS = ("label", "start_from")  # options whose text is free; other words without a dot choose from a config group


def is_harmless(word: str) -> bool:
    """Return whether a run may take ``word``, as in ``gate.k=4``, from a checkpoint.

    Choices of config groups by plain names are harmless. So are values that name no class, no location of data, and no
    file or server of callbacks, loggers and trainer. Other words are not stored; the commands that messages print
    repeat them.
    """
    try:
        override = OverridesParser.create().parse_override(word)
        key, value = override.key_or_group, override.value()
    except (HydraException, ValueError):
        return False
    section, _, option = key.partition(".")
    if option == "_target_" and section in BUILT:
        return is_installed(section, value)
    is_place = key == "data.data_dir" or (section == "data" and key.endswith("_url"))
    if section in LOCAL or is_place or any(part.startswith("_") for part in key.split(".")):
        return False
    if option or key in TEXTS:
        return _is_value(value, option.rpartition(".")[2], section in OBJECTS)
    names = value if isinstance(value, list) else [value]
    return all(not isinstance(name, str) or re.fullmatch(r"[\w-]+(/[\w-]+)*", name) for name in names)


def _is_value(value: Any, key: str, numbers_only: bool) -> bool:
    """Return whether ``value`` holds only plain values; with ``numbers_only``, text only under the keys in NAMES."""
    if isinstance(value, list):
        return all(_is_value(item, key, numbers_only) for item in value)
    if isinstance(value, dict):
        return all(not str(k).startswith("_") and _is_value(v, str(k), numbers_only) for k, v in value.items())
    if isinstance(value, str):
        return "${" not in value and value != "???" and (not numbers_only or key in NAMES)
    return value is None or isinstance(value, bool | int | float)


def _name(word: str) -> str:
    """Return the name of the option or group that a word sets, without the package of a group."""
    return key_of(word).split("@")[0]


def stored_words(checkpoint: Checkpoint) -> list[str]:
    """Return the words of the run of ``checkpoint``. Raises InputError for a word that this program never stores."""
    words = valid(list[Any] | None, checkpoint["config"].get("words"), f"checkpoint {checkpoint.path}: words") or []
    harmful = [word for word in words if not isinstance(word, str) or not is_harmless(word)]
    require(
        not harmful,
        f"checkpoint {checkpoint.path} holds the word {str(harmful[:1])[1:81]}, which could name a class, a file or a "
        "server; this program stores no such words, so another one wrote it",
    )
    return list(words)


def words_in_force(stored: Sequence[str], given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the ``stored`` words that the words ``given`` on the command line do not replace, as two lists.

    The second list has the words below a newly chosen group, as ``trainer.devices=2`` is below ``trainer=default``.
    """
    keys = {_name(word) for word in given}
    kept = [word for word in stored if _name(word) not in keys]
    below = [word for word in kept if keys.intersection(_name(word).split(".")[:-1][:2])]  # also callbacks.lr_schedule
    return [word for word in kept if word not in below], below


def resumed_config(
    checkpoint: Checkpoint, words: Sequence[str], compose: Composer, trust: Sequence[str] = (), evaluate: bool = False
) -> DictConfig:
    """Return the resolved configuration of a run of ``words`` that starts from ``checkpoint``.

    ``compose(words)`` returns the configuration of the installed ``conf/``. ``evaluate``: the run only tests. Raises
    InputError if network, gate, data or (unless ``evaluate``) optimizer differ from the checkpoint's, or if the
    checkpoint names classes that are not trusted.
    """
    saved, stored = checkpoint.config(trust), stored_words(checkpoint)
    if evaluate and "data.test_path" in map(_name, words):  # which has the rows; the column split the training's file
        stored = [word for word in stored if _name(word) != "data.split_column"]
    sure, below = words_in_force(stored, words)
    cfg = compose([*sure, *words])
    if below:  # keep a word if its option has the same default under the new choice as under the run's
        before, chosen = compose([word for word in stored if word not in below]), cfg
        old, new = (flatten(OmegaConf.to_container(each, resolve=False)) for each in (before, chosen))
        same = [word for word in below if _below(old, _name(word)) == _below(new, _name(word)) != {}]
        cfg = compose([*sure, *same, *words])
    try:
        OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise InputError(first_line(error)) from None
    encoder, given = saved["network"].get("config"), OmegaConf.select(cfg, "network.config", default=0)
    # The words give none or a part of the encoder's description; the checkpoint has all of it
    if given is None or (given and encoder and all(encoder.get(key, value) == value for key, value in given.items())):
        cfg.network.config = encoder
    trained = (*FIXED_SECTIONS, "optimizer", "table_optimizer")
    sections, free = (FIXED_SECTIONS, TEST_FILES) if evaluate else (trained, FILES)
    now: Any = OmegaConf.to_container(cfg, resolve=True)
    if wrong := _differences(saved, now, sections, free):
        alone: Any = compose([*stored, "paths.run_dir=."])  # outside of Hydra's own program, the default is not known
        alone = OmegaConf.to_container(alone, resolve=True)
        advice = "Leave these options out to use the checkpoint's, or start a new run"
        if _differences(saved, alone, sections, free):  # whatever the command line says
            advice = f"Another version of mtl than this one, {__version__}, trained it: resume it with that version"
        raise InputError(f"checkpoint {checkpoint.path} has a different configuration: {'; '.join(wrong)}. {advice}")
    return cfg


def _below(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the flat ``values`` at ``key`` and below it."""
    return {name: value for name, value in values.items() if f"{name}.".startswith(f"{key}.")}


def _differences(
    saved: Mapping[str, Any], new: Mapping[str, Any], sections: Sequence[str], free: re.Pattern[str]
) -> list[str]:
    """Return a phrase for each value of ``sections`` that differs, except keys in FREE_KEYS or matching ``free``."""
    lines = []
    for section in sections:
        before, now = (flatten(config.get(section), section) for config in (saved, new))
        keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        keys = [key for key in keys if not (key in FREE_KEYS or key.endswith("_url") or free.fullmatch(key))]
        if f"{section}._target_" in keys:  # options of different classes need not be compared
            keys = [f"{section}._target_"]
        keys = [key for key in keys if not key.startswith(("network.gate.", "network.permutation."))]  # same as gate
        lines += [f"{key} is {before.get(key)} in the checkpoint, {now.get(key)} now" for key in keys]
    return lines[:4] + ([f"and {len(lines) - 4} more"] if len(lines) > 4 else [])


def check_batches(checkpoint: Checkpoint, batch_size: int, processes: int) -> None:
    """Raise InputError if a run resumed with ``processes`` processes would have batches of another size than before.

    ``batch_size``: rows per process. Within an epoch, batches of another size would also repeat or skip rows.
    """
    before, size = len(checkpoint.get("epoch_sums", ())), checkpoint["config"]["data"].get("batch_size")
    if not before or not isinstance(size, int) or before * size == processes * batch_size:
        return
    rows = before * size
    advice = f"to go on with these, give data.batch_size={rows // processes}"
    if rows % processes:
        advice = f"they cannot be divided equally, so resume with {before} processes"
    raise InputError(
        f"data.batch_size={batch_size} in {processes} process{'es' if processes > 1 else ''} makes batches of "
        f"{batch_size * processes} rows, and the run that is resumed has batches of {rows} ({size} in each of "
        f"{before}): {advice}"
    )


def config_to_load(checkpoint: Checkpoint, trust: Sequence[str] = (), data_dir: str | None = None) -> DictConfig:
    """Return the part of a checkpoint's configuration that builds its data and network, without training.

    Data are read from ``data_dir``, by default $MTL_DATA_DIR or ``data``, and fetched from the data modules' addresses.
    """
    config = checkpoint.config(trust)
    data = {key: value for key, value in config["data"].items() if not key.endswith("_url")}
    if "data_dir" in data:
        data["data_dir"] = data_dir or os.environ.get("MTL_DATA_DIR", "data")
    return OmegaConf.create({"compile": False, "network": config["network"], "data": data})
