"""Compose ``conf/`` with the overrides of a command line, and run it with Hydra. Imports nothing slow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict

from mtl.checks import InputError
from mtl.config import resolvers
from mtl.config.portable import is_portable
from mtl.files.run_files import COMMAND, read_json
from mtl.overrides import key_of
from mtl.runs.commands import RUN_FOLDER

resolvers.register()
CONF = Path(str(files("mtl.conf")))
QUICK, FINGERPRINTS = "table_quick", "fingerprints"  # recipes of a table for which nothing is chosen; with molecules
MOLECULE = re.compile(r"(^|: *)['\"]?molecule['\"]?\s*([,}]|$)")  # the kind of a column, as an option names it
CHOOSING = ("gate", "network", "experts", "experiment", "schedule", "permutation", "ckpt", "evaluate")
BOTH = "hydra.searchpath"  # option of a study and of its runs: folders of further YAML files


@contextmanager
def opened(searched: Iterable[str] = ()) -> Iterator[Any]:
    """Provide the Hydra that finds the files of ``conf/``, and of ``searched``, such as ``file:///my/conf``."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        running: Any = GlobalHydra.instance().hydra
        path = running.config_loader.get_search_path()
        for folder in searched:
            path.prepend("command-line", folder, SearchPathQuery(provider="schema"))
        running.config_loader.repository.initialize_sources(path)
        yield running


def composed(overrides: Sequence[str]) -> DictConfig:
    """Compose ``conf/`` with ``overrides``; record them and the choices in the configuration, as for a checkpoint."""
    cfg = hydra.compose("train", list(overrides), return_hydra_config=True)
    with open_dict(cfg):
        hydra_cfg = cfg.pop("hydra")
    return recorded(cfg, hydra_cfg, overrides)


def with_default_recipe(overrides: Sequence[str], searched: Iterable[str] = ()) -> list[str]:
    """Return ``overrides`` with ``recipe=table_quick`` if they choose tables and neither gate, network nor recipe.

    It is ``recipe=fingerprints`` if they have a column of molecules. An option of a mixture, such as ``recipe.k``, or a
    run of another recipe to start from is a choice too; null and none are not. ``searched``: see ``opened``; a data
    file of the user may name ``table`` in its defaults.
    """
    values = {key_of(override): override.partition("=")[2] for override in overrides}
    molecules = [key for key in values if key.startswith("data.columns") and MOLECULE.search(values[key])]
    recipe = FINGERPRINTS if molecules else QUICK
    defaults: list[Any] = [OmegaConf.load(CONF / "recipe" / f"{name}.yaml") for name in (QUICK, FINGERPRINTS)]
    of_default = {f"recipe.{name}" for default in defaults for name in default.recipe}
    keys = [key for key, value in values.items() if value not in ("null", "none", "")]
    is_chosen = any(
        key.split(".")[0] in CHOOSING or key == "recipe" or (key.startswith("recipe.") and key not in of_default)
        for key in keys
    )
    names = values.get("data", "").split(",")
    if is_chosen or _starts_from_other(values, recipe) or not all(_is_plain_table(name, searched) for name in names):
        return [*overrides]
    return [*overrides, f"recipe={recipe}"]


def _starts_from_other(values: Mapping[str, str], recipe: str) -> bool:
    """Return whether a run starts from one in whose folder another recipe than ``recipe`` is recorded."""
    folder = resolvers.run_folder(values.get("start_from", "").strip("'\""))
    choices = None if folder is None else read_json(folder / COMMAND).get("choices")
    return isinstance(choices, Mapping) and choices.get("recipe", recipe) != recipe


def _is_plain_table(name: str, searched: Iterable[str]) -> bool:
    """Return whether the data file ``name`` is ``table``, or one of the user's whose defaults are ``table`` alone."""
    files = [Path(folder.removeprefix("file://"), "data", f"{name}.yaml") for folder in searched]
    try:
        content: Any = next((OmegaConf.to_container(OmegaConf.load(file)) for file in files if file.is_file()), {})
        defaults = [entry for entry in content["defaults"] if entry != "_self_"]
    except Exception:  # Hydra says what is wrong with the file
        defaults = []
    return name == "table" or defaults in (["table"], ["/data/table"])


def recorded(cfg: DictConfig, hydra_cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return ``cfg`` with its harmless ``overrides`` and its choices of config groups, for reports and resumed runs."""
    with open_dict(cfg):
        cfg.overrides = [override for override in overrides if is_portable(override)]
        cfg.choices = choices_of(hydra_cfg, cfg.get("logger"))
    return cfg


def own_options(file: str, *others: str) -> list[str]:
    """Return the options of a study in ``conf/FILE``, without its sections ``others``."""
    return [str(name) for name in OmegaConf.load(CONF / file) if name not in ("defaults", *others)]


def split_overrides(overrides: Sequence[str], options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides that set ``options``, and those for runs. The last one of an option counts."""
    # ~x and +x=1 are two
    overrides_by_key = {("~" if text.startswith("~") else "") + key_of(text): text for text in overrides}
    for key in RUN_FOLDER & overrides_by_key.keys():
        raise InputError(f"{overrides_by_key[key]}: each run has a folder of its own; leave this option out")
    ours = [override for key, override in overrides_by_key.items() if key.split(".")[0] in options or key == BOTH]
    return ours, [override for key, override in overrides_by_key.items() if key == BOTH or override not in ours]


def choices_of(hydra_cfg: DictConfig, loggers: Iterable[str] | None) -> dict[str, str | list[str] | None]:
    """Return the option chosen from each config group, without the experiment, which is only a set of values.

    ``loggers``: the names of the loggers, since Hydra does not report the choice if there are several.
    """
    chosen = hydra_cfg.runtime.choices.items()
    choices = {name: option for name, option in chosen if not name.startswith("hydra/") and name != "experiment"}
    return choices | {"logger": choices.get("logger") or list(loggers or ()) or None}


def installed_data() -> dict[str, str]:
    """Return the names of the data files of ``conf/`` by the class that each names."""
    files = sorted((CONF / "data").glob("*.yaml"))
    kinds = {file.stem: re.search(r"^ *_target_: (\S+)", file.read_text(), re.MULTILINE) for file in files}
    return {kind[1]: name for name, kind in kinds.items() if kind}
