"""Name runs by the options that distinguish them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

OWN = ("label", "ckpt", "evaluate", "trust")
ALL = "all runs"  # if nothing distinguishes them
Options = dict[str, str]


def given_options(words: Iterable[str]) -> Options:
    """Return the options that Hydra's overrides ``words`` set, by name, without seeds and folders."""
    pairs = (word.lstrip("+").partition("=") for word in words)
    return {name: value for name, _, value in pairs if not _is_own(name)}


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
    return "seed" in name.split(".")[-1] or name.startswith(("paths.", "hydra.")) or name in OWN
