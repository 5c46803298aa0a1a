"""Read the composed configuration as a tree of values, each with the key under which it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from mtl.checks import InputError, require
from mtl.config.schema import tables
from mtl.kinds import shown, suggestion

REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+|\[\d+\])*)\}")  # ${recipe.k}, without resolvers or nesting
REFERRED = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?![\w.]*:)")  # the beginning of any reference
LARGEST = 2_000_000  # values; references to references can stand for any number of them

Path = tuple[Any, ...]  # keys from the root: names, and indices of lists


@dataclass(frozen=True)
class Node:
    """A value: a scalar, or nodes by name, or a list of nodes.

    ``key``: where the value is written. A value of ``gate.k`` that is ``${recipe.k}`` has the key ``recipe.k``.
    """

    key: str
    value: Any

    def plain(self) -> Any:
        """Return the value with plain dicts and lists in it."""
        if isinstance(self.value, dict):
            return {name: child.plain() for name, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def children(self) -> Iterator[Node]:
        """Yield the nodes directly below."""
        yield from self.value.values() if isinstance(self.value, dict) else ()
        yield from self.value if isinstance(self.value, list) else ()


class Reader:
    """Follow all references of ``cfg``; raise InputError for one that leads nowhere, or in a circle."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.raw = OmegaConf.to_container(cfg, resolve=False)
        self.count = 0

    def tree(self) -> Node:
        """Return the whole configuration."""
        return self._read((), self.raw, ())

    def references(self) -> set[str]:
        """Return the dotted names of all values that an interpolation refers to, as far as they are written there."""
        texts = (text for text in _leaves(self.raw) if isinstance(text, str) and "${" in text)
        return {name.lstrip(".") for text in texts for name in REFERRED.findall(text)}

    def value(self, names: Sequence[str]) -> Any:
        """Return what is written under these names, None if there is nothing."""
        node = self.raw
        for name in names:
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def elsewhere(self, name: str, but: str = "") -> str:
        """Return "; did you mean KEY?" with another option of this name, "" if there is none; see ``suggestion``."""
        keys = [tuple(map(str, path)) for path in _paths(self.raw) if str(path[-1]) == name]
        keys = [key for key in keys if len(key) > 1 and ".".join(key) != but]
        near = min(keys, key=lambda key: ("${" in str(self.value(key)), len(key)), default=())
        return f"; did you mean {'.'.join(near)}?" if near else ""

    def _read(self, path: Path, raw: Any, trail: tuple[Path, ...]) -> Node:
        """Return the node of ``raw``, which is written at ``path``; ``trail``: the references that led here."""
        self.count += 1
        require(self.count <= LARGEST, f"the configuration stands for more than {LARGEST:,} values; use fewer of ${{}}")
        key = ".".join(map(str, path))
        if isinstance(raw, dict):
            return Node(key, {str(name): self._read((*path, name), child, trail) for name, child in raw.items()})
        if isinstance(raw, list):
            return Node(key, [self._read((*path, index), child, trail) for index, child in enumerate(raw)])
        require(raw != "???", f"{key} is missing; give {key}=...")
        if not isinstance(raw, str) or "${" not in raw:
            return Node(key, raw)
        found = self._follow(raw, trail)
        if found is None:
            return _constant(key, self._resolved(path, raw))
        target, value = found
        circle = target in trail or target == path
        require(not circle, f"{key}={shown(raw)}: refers to itself; give it a value of its own")
        return self._read(target, value, (*trail, target))

    def _follow(self, raw: str, trail: tuple[Path, ...]) -> tuple[Path, Any] | None:
        """Return where the reference ``raw`` leads to and what is written there; None if OmegaConf has to find it."""
        match = REFERENCE.fullmatch(raw)
        if match is None or len(trail) > 50:
            return None
        path: Path = ()
        value: Any = self.raw
        names = re.findall(r"\w+", match[1])
        for index, name in enumerate(names):
            if isinstance(value, dict) and name in value:
                path, value = (*path, name), value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                path, value = (*path, int(name)), value[int(name)]
            else:
                return None
            if isinstance(value, str) and index < len(names) - 1:  # a section that is itself a reference
                section = self._follow(value, (*trail, path))
                if section is None:
                    return None
                path, value = section
        return path, value

    def _resolved(self, path: Path, raw: str) -> Any:
        """Return the value that OmegaConf gives the interpolation ``raw`` at ``path``."""
        try:
            node: Any = self.cfg
            for name in path:
                node = node[name]
            is_section = isinstance(node, DictConfig | ListConfig)
            return OmegaConf.to_container(node, resolve=True) if is_section else node
        except RecursionError:
            reason, text = "refers to itself; give it a value of its own", ""
        except Exception as error:  # a resolver may raise anything
            reason, text = self._reason(error), str(error)
        key = ".".join(map(str, path))
        for reference in re.findall(r"\w+(?:\.\w+)+", f"{raw} {text}"):
            self._require_sections(key, reference)
        raise InputError(f"{key}={shown(raw)}: {reason}") from None

    def _require_sections(self, key: str, reference: str) -> None:
        """Raise InputError if ``reference``, which option ``key`` holds, leads through a value that is no section."""
        value, names = self.raw, reference.split(".")
        for index, name in enumerate(names[:-1], start=1):
            if not isinstance(value, dict) or name not in value:
                return
            value, where = value[name], ".".join(names[:index])
            if isinstance(value, str) and "${" in value:
                self._read(tuple(names[:index]), value, ())  # the error may be in there
                return
            section = isinstance(value, dict) or (isinstance(value, list) and names[index].isdecimal())
            require(section, f"{where}={shown(value)}: must be a section, since {key} refers to {reference}")

    def _reason(self, error: Exception) -> str:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if match := re.search(r"Interpolation key '(.+)' not found", text):
            if match[1] in tables.OBJECTS:
                return f"there is no section {match[1]}; choose one with {match[1]}=NAME"
            keys = [".".join(map(str, path)) for path in _paths(self.raw)]
            return f"there is no {match[1]}{suggestion(match[1], keys)}"
        if match := re.search(r"Environment variable '(.+)' not found", text):
            return f"the environment variable {match[1]} is not set"
        if match := re.search(r"Unsupported interpolation type (.+)", text):
            return f"there is no resolver {match[1]}; a reference to an option is written ${{section.option}}"
        if match := re.search(r"Missing mandatory value: (.+)", text):
            return f"{match[1]} is missing; give {match[1]}=..."
        return f"cannot be resolved: {text}"


def _constant(key: str, value: Any) -> Node:
    if isinstance(value, dict):
        return Node(key, {str(name): _constant(f"{key}.{name}", child) for name, child in value.items()})
    if isinstance(value, list):
        return Node(key, [_constant(f"{key}.{index}", child) for index, child in enumerate(value)])
    return Node(key, value)


def _leaves(raw: Any) -> Iterator[Any]:
    for child in raw.values() if isinstance(raw, dict) else raw if isinstance(raw, list) else ():
        yield from _leaves(child)
    if not isinstance(raw, dict | list):
        yield raw


def _paths(raw: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every value below ``raw``."""
    items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for name, child in items:
        yield (*path, name)
        yield from _paths(child, (*path, name))
