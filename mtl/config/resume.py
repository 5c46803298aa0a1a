"""Build the configuration of a run that starts from a checkpoint: the checkpoint's own, with the command line on top.

A checkpoint holds its configuration with all values filled in. ``conf/`` says how values depend on each other, as in
``patience: ${recipe.patience}``: a value that still equals the one it refers to follows it again when the command line
changes that one. What could write files, reach a server or run code comes from ``conf/`` and the command line alone:
see ``mtl.config.trust``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtl.checkpoints.files import read_checkpoint
from mtl.checks import InputError, require
from mtl.config.schema.tables import SEVERAL
from mtl.config.trust import OWN, check_target, is_trusted
from mtl.records import flatten

Composer = Callable[[Sequence[str]], DictConfig]

# The weights depend on these sections, so a run that starts from a checkpoint must not change them,
FIXED_SECTIONS = ("gate", "network", "data", "permutation", "weighting")
# except for these keys, which say where files are and how rows are loaded, and keys that end with _url.
FREE_KEYS = {f"data.{name}" for name in ("data_dir", "download", "workers", "eval_batch_size", "pin_memory")}
FREE_KEYS.add("data.batch_size")  # for another number of processes, see ``check_batches``
# The files of the user's tables and texts. A checkpoint that describes its data knows the vocabularies and scales of
# the training without them, and notices if they have changed
FILES = re.compile(r"data\.(tasks\.[^.]+\.)?(path|val_path|test_path)")
TEST_FILES = re.compile(FILES.pattern + r"|data\.(split_column|separator)")  # how they are read
# Options of callbacks, logger and trainer whose text a checkpoint may set: names of metrics, modes, devices
NAMES = (
    "accelerator",
    "devices",
    "gradient_clip_algorithm",
    "max_time",
    "mode",
    "monitor",
    "precision",
    "shape",
    "target",
)

LINK = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")  # a reference to another value, and nothing else


def config_from_checkpoint(
    path: str | Path, words: Sequence[str], compose: Composer, trust: Sequence[str] = (), evaluate: bool = False
) -> DictConfig:
    """Return the configuration of a run that starts from the checkpoint at ``path``, resolved.

    ``words``: the arguments of the command line; ``compose(words)`` returns the configuration of the installed
    ``conf/`` with ``words``, unresolved, and the options chosen from config groups under ``choices``. A group among the
    words, as in ``trainer=default``, changes only the values in which it differs from the option that the run chose.
    ``evaluate``: the run only tests. Raises InputError if the command line asks for another network, gate, data or
    (unless ``evaluate``) optimizer than the checkpoint's, and for a checkpoint that names classes that are not trusted.
    """
    checkpoint = read_checkpoint(path, trust)
    saved = checkpoint["config"]
    given, choices = {_key(word) for word in words}, saved.get("choices", {})
    require(isinstance(choices, Mapping), f"checkpoint {path}: choices={choices!r} in its configuration is no section")
    template, chosen = _template(choices, compose)
    kept = [word for word in chosen if _key(word) not in given]
    asked = plain(compose([*kept, *words]))

    merged: dict[str, Any] = linked(saved, template, saved)
    own = _Own(saved, given, trust, path)
    for section in OWN:
        merged[section] = own.merged(section, asked.get(section), saved.get(section))
    if "schedule" in given:  # it replaces the run's, if only by none
        without = _built(plain(compose([*kept, "schedule=none"])))
        callbacks = {name: node for name, node in merged["callbacks"].items() if name not in _built(template) - without}
        merged["callbacks"] = callbacks | {name: asked["callbacks"][name] for name in _built(asked) - without}
    _apply(merged, template, asked if "label" in given else asked | {"label": template["label"]})
    merged["data"] = _with_own_places(merged["data"])
    always = ("paths", "ckpt", "evaluate", "trust", "changed_data", *(k for k in flatten(asked) if _is_place(k)))
    for key in [*(given - asked["choices"].keys() - {"experiment"}), *always]:
        _copy(asked, merged, key)
    merged["choices"] = {**choices, **{k: v for k, v in asked["choices"].items() if k in given}}

    try:
        final = plain(OmegaConf.create(merged), resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the configuration in checkpoint {path} does not fit this program: {reason}") from None
    wrong = _differences(
        saved,
        final,
        FIXED_SECTIONS if evaluate else (*FIXED_SECTIONS, "optimizer"),
        TEST_FILES if evaluate else FILES,
    )
    require(
        not wrong,
        f"checkpoint {path} has a different configuration: {'; '.join(wrong)}. Leave these options out to use the "
        "checkpoint's, or start a new run without it",
    )
    result = OmegaConf.create(final)
    OmegaConf.set_struct(result, True)
    return result


def kept_words(cfg: DictConfig, words: Sequence[str]) -> list[str]:
    """Return those of ``words`` that a run needs again if it starts from a checkpoint of the run of ``cfg``.

    They set what a checkpoint must not set, or does not contain: places, servers, classes, trust.
    """
    kept = []
    for word in words:
        key = _key(word)
        section, _, option = key.partition(".")
        if section in OWN and option:
            value = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
            is_kept = not _is_harmless(key.rpartition(".")[2], value)
        else:
            is_kept = section in ("trust", "changed_data") or _is_place(key)
        kept += [word] * is_kept
    return kept


def check_batches(checkpoint: Mapping[str, Any], batch_size: int, processes: int) -> None:
    """Raise InputError if a resumed run with so many processes would have batches of another size than before.

    ``batch_size``: the rows that each of the processes takes. Within an epoch, batches of another size would also
    repeat rows or leave out some.
    """
    before, size = len(checkpoint.get("epoch_sums", ())), checkpoint["config"]["data"].get("batch_size")
    if not before or size is None or before * size == processes * batch_size:
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


def config_to_load(path: str | Path, trust: Sequence[str] = (), data_dir: str | None = None) -> DictConfig:
    """Return the configuration in a checkpoint for building its data and network, without training.

    Data are read from ``data_dir``, by default $MTL_DATA_DIR or ``data``; addresses are those of the data modules.
    """
    config = dict(read_checkpoint(path, trust)["config"])
    data = _with_own_places(config["data"])
    if "data_dir" in data:
        data["data_dir"] = data_dir or os.environ.get("MTL_DATA_DIR", "data")
    return OmegaConf.create({"compile": False, "network": config["network"], "data": data})


def plain(cfg: DictConfig, resolve: bool = False) -> dict[str, Any]:
    """Return a configuration as nested dicts and lists; ``resolve`` the interpolations, or leave them."""
    container = OmegaConf.to_container(cfg, resolve=resolve)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def linked(node: Any, template: Any, saved: Mapping[str, Any]) -> Any:
    """Return ``node``, a part of ``saved``, with the references of ``template`` wherever they give the same value."""
    link = LINK.fullmatch(template) if isinstance(template, str) else None
    if link and _find(saved, link[1]) == node:
        return template
    if isinstance(node, Mapping):
        below = template if isinstance(template, Mapping) else {}
        return {key: linked(value, below.get(key), saved) for key, value in node.items()}
    if isinstance(node, list):
        same = isinstance(template, list) and len(template) == len(node)
        return [linked(value, template[i] if same else None, saved) for i, value in enumerate(node)]
    return node


@dataclass(frozen=True)
class _Own:
    """Add the harmless values of a checkpoint's configuration to callbacks, logger and trainer of this program.

    Harmless are numbers, switches and null, and text under the keys of ``NAMES``. Classes, files and folders are always
    this program's; an object that it does not have must be of a class that is trusted.
    """

    saved: Mapping[str, Any]
    given: Collection[str]  # keys on the command line: the checkpoint's values do not matter there
    trust: Sequence[str]
    path: str | Path

    def merged(self, section: str, own: Any, node: Any) -> Any:
        """Return ``own``, this program's node ``section``, with the harmless values of the checkpoint's ``node``."""
        if section == "paths" or not isinstance(node, Mapping):
            return None if node is None and section in self.saved else own
        result = dict(own) if isinstance(own, Mapping) else {}
        for key, value in node.items():
            here, known = f"{section}.{key}", result.get(key)
            if isinstance(value, Mapping) and here not in self.given:
                target = value.get("_target_")
                same = isinstance(known, Mapping) and known.get("_target_") == value.get(
                    "_target_", known.get("_target_")
                )
                if not same:
                    where = f"checkpoint {self.path}: {here}"
                    check_target(section.split(".")[0], target, self.trust, where)
                    known = {"_target_": target} if not is_trusted(str(target), self.trust) else value
                result[key] = self.merged(here, known, value)
            elif not isinstance(value, Mapping) and _is_harmless(key, value):
                result[key] = linked(value, known, self.saved)
        if section in SEVERAL:
            asked = {key.split(".")[1] for key in self.given if key.startswith(f"{section}.")}
            result = {key: value for key, value in result.items() if key in node or key in asked}
        return result


def _built(config: Mapping[str, Any]) -> set[str]:
    """Return the names of the callbacks that a run of ``config`` has."""
    return {name for name, node in config["callbacks"].items() if isinstance(node, Mapping) and "_target_" in node}


def _is_harmless(key: str, value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_harmless(key, item) for item in value)
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and key in NAMES)


def _apply(merged: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Change ``merged`` wherever ``after`` differs from ``before``; an object of another class replaces it whole."""
    for name in before.keys() - after.keys():
        merged.pop(name, None)
    for name, value in after.items():
        old, node = before.get(name), merged.get(name)
        if old == value and name in before:
            continue
        if (
            isinstance(node, dict)
            and isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and old.get("_target_") == value.get("_target_")
        ):
            _apply(node, old, value)
        else:
            merged[name] = value


def _copy(source: Mapping[str, Any], target: dict[str, Any], key: str) -> None:
    """Set ``key`` of ``target`` to its value in ``source``, if it has one there."""
    missing = object()
    value = _find(source, key, missing)
    if value is missing:
        return
    *parents, last = key.split(".")
    for name in parents:
        if not isinstance(target.get(name), dict):
            target[name] = {}
        target = target[name]
    target[last] = value


def _find(node: Any, key: str, default: Any = None) -> Any:
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return default
        node = node[name]
    return node


def _key(word: str) -> str:
    return word.lstrip("+~").split("=")[0].split("@")[0]


def _template(choices: Mapping[str, Any], compose: Composer) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of ``choices`` (option by config group), and the words that choose them.

    Left out are options that do not exist here: a user's own may lie in a folder that is not given. A choice that is no
    plain name is refused: it could lead to any file.
    """
    words = []
    for group, option in choices.items():
        if isinstance(option, str | list):
            options = [option] if isinstance(option, str) else option
            plain_names = all(re.fullmatch(r"\w+(/\w+)*", str(name)) for name in (group, *options))
            require(plain_names, f"choices.{group}={option!r} in the checkpoint is not the name of an option")
            words.append(f"{group}={option}" if isinstance(option, str) else f"{group}=[{','.join(option)}]")
    try:
        return plain(compose(words)), words
    except HydraException:
        words = [word for word in words if _composes(compose, word)]
        return plain(compose(words)), words


def _composes(compose: Composer, word: str) -> bool:
    try:
        compose([word])
    except HydraException:
        return False
    return True


def _differences(
    saved: Mapping[str, Any], given: Mapping[str, Any], sections: Sequence[str], free: re.Pattern[str] | None = None
) -> list[str]:
    """Return a phrase for each value of ``sections`` that differs, but for keys that are free or match ``free``."""
    lines = []
    for section in sections:
        old, new = (flatten(config.get(section), section) for config in (saved, given))
        keys = sorted(key for key in old.keys() | new.keys() if not _is_free(key) and old.get(key) != new.get(key))
        keys = [key for key in keys if free is None or not free.fullmatch(key)]
        if f"{section}._target_" in keys:  # options of different classes need not be compared
            keys = [f"{section}._target_"]
        keys = [key for key in keys if not key.startswith(("network.gate.", "network.permutation."))]  # same as gate
        lines += [f"{key} is {old.get(key)} in the checkpoint, {new.get(key)} given" for key in keys]
    return lines[:4] + ([f"and {len(lines) - 4} more"] if len(lines) > 4 else [])


def _is_place(key: str) -> bool:
    """Return whether ``key`` says where data are: a checkpoint must not send a user's program to other places."""
    return key == "data.data_dir" or (key.startswith("data.") and key.endswith("_url"))


def _with_own_places(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's section ``data`` with this program's folder, and without addresses."""
    data = {key: value for key, value in data.items() if not key.endswith("_url")}
    return data | {"data_dir": "${paths.data_dir}"} if "data_dir" in data else data


def _is_free(key: str) -> bool:
    return key in FREE_KEYS or key.endswith("_url")
