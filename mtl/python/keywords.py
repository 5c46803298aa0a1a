"""Options given in Python by keywords, as in ``mtl.fit(..., lr=3e-4)``, and the names that they have in conf/."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtl.checks import InputError, suggestion
from mtl.files.plain_yaml import parse_yaml

# Sections whose options have keywords of their own names: the first section that has an option of the name gets it
SECTIONS = {"data": "table", "trainer": "default", "optimizer": "adam"}
NOT_KEYWORDS = {
    "ckpt",
    "evaluate",
    "overrides",
    "choices",
    "path",
    "val_path",
    "test_path",
    "data_dir",
    "default_root_dir",
}


def options_of(keywords: Mapping[str, Any], conf: Path) -> dict[str, Any]:
    """Return the values of ``keywords`` by the names of their options. Raises InputError for an unknown keyword.

    A keyword is an option of ``train.yaml`` or a config group (``seed``, ``gate``), or else an option of the chosen
    data, trainer or optimizer, or of ``recipe``: ``max_epochs`` is ``trainer.max_epochs``, ``k`` is ``recipe.k``.
    """
    top = parse_yaml((conf / "train.yaml").read_text())
    groups = [str(name) for entry in top["defaults"] if entry != "_self_" for name in entry]
    option_of = {name: name for name in (*map(str, top), *groups)}
    for section, default in SECTIONS.items():
        file = conf / section / f"{keywords.get(section, default)}.yaml"
        options = parse_yaml(file.read_text()) if file.is_file() else {}
        section_options = options.get(section, options)
        names = [str(name) for name in section_options if not str(name).startswith("_")]
        option_of = {name: f"{section}.{name}" for name in names} | option_of
    option_of = {str(name): f"recipe.{name}" for name in top["recipe"]} | option_of
    option_of = {name: option for name, option in option_of.items() if name not in ("defaults", "hydra", *NOT_KEYWORDS)}
    if unknown := [name for name in keywords if name not in option_of]:
        near = suggestion(unknown[0], option_of)
        raise InputError(
            f"{unknown[0]}: no such keyword{f'{near} Any' if near else '; any'} option of the command line goes into "
            "options, as in options={'optimizer.lr': 3e-4}"
        )
    return {option_of[name]: value for name, value in keywords.items()}


def with_options(values: Mapping[str, Any], options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``values``, by option, and those of ``options``. Raises InputError for an option that is given twice.

    ``{"optimizer": {"lr": 3e-4}}`` is ``{"optimizer.lr": 3e-4}``.
    """
    pairs: list[tuple[str, Any]] = []
    for option, value in (options or {}).items():
        inside = isinstance(value, Mapping) and "." not in option
        pairs += [(f"{option}.{name}", entry) for name, entry in value.items()] if inside else [(option, value)]
    further = dict(pairs)
    counts = Counter([*values, *(option for option, _ in pairs)])
    if twice := [option for option, count in counts.items() if count > 1]:
        raise InputError(f"{twice[0]} is given twice, by a keyword or in options; give it once")
    return {**values, **further}
