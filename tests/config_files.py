"""Read each file of ``conf/`` and parse each reference once: tests compose hundreds of configurations.

Each has some 25 files, and its references, such as ``${recipe.k}``, are resolved several times in a run.
"""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import omegaconf.base
from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository
from hydra.core.default_element import InputDefault
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult

from tests.conftest import ROOT

_kept: dict[str, bytes] = {}
_read = ConfigRepository.load_config
_choices = defaults_list._create_interpolation_map


def _load(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Return a file as Hydra read it the first time, as an object of its own; files of users are read anew."""
    source = self._find_object_source(config_path, ObjectType.CONFIG)
    if source is None or source.path not in (str(ROOT / "conf"), "hydra.conf"):
        return _read(self, config_path)
    if config_path not in _kept:
        _kept[config_path] = pickle.dumps(_read(self, config_path))
    return pickle.loads(_kept[config_path])  # faster than copy.deepcopy


def _choices_if_named(overrides: Any, defaults: list[InputDefault], self_added: bool) -> Any:
    """Return the choices that a defaults list may name, such as ``${network}``; None if it names none."""
    return _choices(overrides, defaults, self_added) if any(entry.is_interpolation() for entry in defaults) else None


def keep_files() -> None:
    """Let Hydra keep the files of ``conf/``, in this process and those that are forked from it.

    It also makes no table of all choices for each of these files, which takes a quarter of the time of composing.
    """
    ConfigRepository.load_config = _load  # type: ignore[method-assign]  # Hydra has no option for this
    defaults_list._create_interpolation_map = _choices_if_named
    omegaconf.base.parse = cache(omegaconf.base.parse)
