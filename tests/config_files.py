"""Read each file of ``conf/`` once: tests compose hundreds of configurations, of some 25 files each."""

from __future__ import annotations

import pickle

from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult

from tests.conftest import ROOT

_kept: dict[str, bytes] = {}
_read = ConfigRepository.load_config


def _load(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Return a file as Hydra read it the first time, as an object of its own; files of other folders are read anew."""
    source = self._find_object_source(config_path, ObjectType.CONFIG)
    if source is None or source.path != str(ROOT / "conf"):
        return _read(self, config_path)
    if config_path not in _kept:
        _kept[config_path] = pickle.dumps(_read(self, config_path))
    return pickle.loads(_kept[config_path])  # faster than copy.deepcopy


def keep_files() -> None:
    """Let Hydra keep the files of ``conf/``, in this process and those that are forked from it."""
    ConfigRepository.load_config = _load  # type: ignore[method-assign]  # Hydra has no option for this
