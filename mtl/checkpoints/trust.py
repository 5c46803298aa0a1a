"""Decide which classes a checkpoint may name, since it may come from a stranger.

To use a network, the program builds the objects that the checkpoint's configuration names, and a name can stand for
any function of any library. Therefore only names that the installed ``conf/`` uses in the same section are accepted,
and the optimizers of torch. A user's own classes need ``trust=[my_package]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mtl.checks import InputError, require
from mtl.files.plain_yaml import parse_yaml

CONF = Path(str(files("mtl.conf")))

# The sections whose objects are built from a checkpoint's configuration, and the sections that they refer to
BUILT = {
    "bottom": ("bottom",),
    "gate": ("gate",),
    "experts": ("experts",),
    "heads": ("heads",),
    "permutation": ("permutation",),
    "network": ("network", "bottom", "gate", "experts", "heads", "permutation"),
    "data": ("data",),
    "optimizer": ("optimizer",),
    "weighting": ("weighting",),
}
UNBUILT = ("callbacks", "logger", "trainer")  # sections of a checkpoint from which nothing is ever built
REQUIRED = ("data", "network", "optimizer")
DEEPEST = 40  # levels of nesting; the deepest published configuration has 7


def check_config(config: Any, trust: Sequence[str], path: str | Path) -> None:
    """Raise InputError unless ``config``, the configuration in the checkpoint at ``path``, is harmless.

    Every ``_target_`` must be a class that the installed ``conf/`` names in that section, or lie in a package of
    ``trust``, but for paths and the sections of ``UNBUILT``, from which nothing is built. No key and no value of any
    section may hold an interpolation, which could read the environment, or be the missing value ``???``.
    """
    location = f"checkpoint {path}"
    require(isinstance(config, Mapping), f"{location}: its configuration is a {type(config).__name__}, not a dict")
    for key, value in leaves(config, location=location):
        for text in (*key, value):
            require(
                not (isinstance(text, str) and ("${" in text or text == "???")),
                f"{location}: {'.'.join(map(str, key))} holds an interpolation or ???, {str(value)[:60]!r}; "
                "configurations are stored without them, so this one was not written by this program",
            )
        if key[-1] == "_target_" and key[0] not in (*UNBUILT, "paths"):
            check_target(str(key[0]), value, trust, f"{location}: {'.'.join(map(str, key[:-1]))}")
    whole = all(isinstance(config.get(name), Mapping) and "_target_" in config[name] for name in REQUIRED)
    message = f"{location}: its configuration lacks one of {', '.join(REQUIRED)}; it was not written by this program"
    require(whole, message)


def is_installed(section: str, target: Any) -> bool:
    """Return whether ``target`` is named by the installed ``conf/`` in ``section`` or is an optimizer of torch."""
    allowed = {name for other in BUILT.get(section, (section,)) for name in installed_targets().get(other, ())}
    if section == "optimizer":
        import torch  # slow

        allowed |= {f"torch.optim.{name}" for name in torch.optim.__all__ if name[0].isupper()}  # classes
    return isinstance(target, str) and target in allowed


def check_target(section: str, target: Any, trust: Sequence[str], location: str) -> None:
    """Raise InputError unless a checkpoint may name ``target`` in ``section``; ``location`` begins the message."""
    if not isinstance(target, str) or not (is_installed(section, target) or is_trusted(target, trust)):
        package = target.split(".")[0] if isinstance(target, str) else "my_package"
        raise InputError(
            f"{location} names {str(target)[:80]!r}, which this program does not use there. It could run any code: if "
            f"it is yours and you trust the checkpoint, add trust=[{package}] (mtl predict and others: --trust "
            f"{package})"
        )


def is_trusted(target: str, trust: Sequence[str]) -> bool:
    """Return whether ``target`` lies in one of the packages or modules of ``trust``."""
    return any(target == name or target.startswith(f"{name}.") for name in trust)


def leaves(
    node: Any, key: tuple[Any, ...] = (), location: str = "the configuration"
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (key, value) of every leaf of nested dicts and lists; a key is a tuple of names and indices."""
    message = f"{location}: {'.'.join(map(str, key[:3]))}... is nested more than {DEEPEST} levels deep"
    require(len(key) <= DEEPEST, message)
    if isinstance(node, Mapping):
        children: Any = node.items()
    elif isinstance(node, list | tuple):
        children = enumerate(node)
    else:
        yield key, node
        return
    for name, child in children:
        if name == "_target_":  # a leaf, even if it is a dict
            yield (*key, name), child
        else:
            yield from leaves(child, (*key, name), location)


@cache
def installed_targets() -> Mapping[str, frozenset[str]]:
    """Return the classes that the installed ``conf/`` names, by section of the configuration."""
    return targets_in(CONF)


def targets_in(folder: str | Path) -> Mapping[str, frozenset[str]]:
    """Return the classes that the YAML files in ``folder`` name, by section of the configuration."""
    classes: dict[str, set[str]] = {}
    for file in sorted(Path(folder).rglob("*.yaml")):
        text = file.read_text()
        parents = file.relative_to(folder).parts[:-1]
        first = text.split("\n", 1)[0]
        package = first.removeprefix("# @package ").strip() if first.startswith("# @package ") else ".".join(parents)
        start = () if package in ("_global_", "") else tuple(package.split("."))
        for key, value in leaves(parse_yaml(text) or {}, start):
            if key[-1] == "_target_":
                classes.setdefault(key[0], set()).add(value)
    return {section: frozenset(names) for section, names in classes.items()}


def classes_in(folders: Iterable[str | Path]) -> list[str]:
    """Return the classes that the YAML files in the user's own ``folders`` name; a checkpoint may name them too."""
    return [name for folder in folders for names in targets_in(folder).values() for name in names]
