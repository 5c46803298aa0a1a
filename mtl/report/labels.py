"""Name runs by the options that distinguish them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtl.records import flatten

ALL = "all runs"  # if nothing distinguishes them
NO_OPTION = "-"  # the value of an option that a run was not given
Options = dict[str, str]


def given_options(words: Iterable[str]) -> Options | None:
    """Return the options that Hydra's overrides ``words`` set, by name, without seeds and folders.

    None if the words do not say what was trained, because the run resumes or tests a checkpoint.
    """
    options = {}
    for word in words:
        name, _, value = word.partition("=")
        name = name.lstrip("+")
        if name in ("ckpt", "evaluate"):
            return None
        if not _is_own(name):
            options[name] = value
    return options


def config_options(configs: Sequence[Mapping[str, Any]]) -> list[Options]:
    """Return for each run the options that distinguish the resolved configurations, without seeds and folders.

    Choices of config groups come first, then options with short names. An option is left out if earlier options
    determine its value in all runs, as ``gate`` determines the unchanged options of a gate.
    """
    flat = [flatten(dict(config)) for config in configs]
    places = [str(config.get("paths.run_dir", "\0")) for config in flat]  # no value has a null character
    names = {name for config in flat for name in config}
    chosen: list[Options] = [{} for _ in flat]
    apart: list[tuple[str, ...]] = [()] * len(flat)  # the values of the options so far, by run
    for name in sorted(names, key=lambda name: (not name.startswith("choices."), len(name), name)):
        values = [str(config.get(name, NO_OPTION)) for config in flat]
        if _is_own(name) or any(place in value for place, value in zip(places, values, strict=True)):
            continue
        further = [(*before, value) for before, value in zip(apart, values, strict=True)]
        if len(set(further)) > len(set(apart)):
            apart = further
            for options, value in zip(chosen, values, strict=True):
                options[name.removeprefix("choices.")] = value
    return chosen


def differing(options: Sequence[Options]) -> list[str]:
    """Return the names of the options that differ between runs, in order of appearance."""
    names = dict.fromkeys(name for each in options for name in each)
    return [name for name in names if len({each.get(name) for each in options}) > 1]


def labels(options: Sequence[Options]) -> tuple[str, list[str]]:
    """Return a heading and the label of each run, without the options that all runs share.

    If every run was given all differing options, the heading names them and the labels are their values, as in
    "gate, data.rho" and "topk, 0.5". Otherwise the heading is "setting", and labels are like ``gate=topk
    data.rho=0.5``.
    """
    names = differing(options)
    if names and all(name in each for each in options for name in names):
        return ", ".join(names), [", ".join(each[name] for name in names) for each in options]
    words = [" ".join(f"{name}={each[name]}" for name in names if name in each) for each in options]
    return "setting", [word or ("defaults" if names else ALL) for word in words]


def _is_own(name: str) -> bool:
    """Return whether the runs of one setting differ in this option, as in their seeds and folders."""
    return "seed" in name.split(".")[-1] or name.startswith(("paths.", "hydra.")) or name in ("label", "words")
