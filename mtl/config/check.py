"""Check the composed configuration before anything is built: types, ranges, choices, names.

What a class accepts follows from the annotations of its constructor (see ``mtl.options``), so a new gate, network or
data set needs no entry here. ``mtl.config.accepted`` covers options that belong to no class, and options that
Lightning does not check.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError
from torch import nn

from mtl.checks import InputError, first_line, format_value, in_one_line, join_names, require, suggestion
from mtl.config.accepted import FOREIGN, HYDRA, OBJECTS, SEVERAL, TOP
from mtl.config.compose import composed
from mtl.config.hydra_errors import explained
from mtl.config.patterns import with_columns
from mtl.networks.base import MultiTaskNetwork
from mtl.options import Positive, UnbuiltObject, adapter, options_of, sentences
from mtl.overrides import key_of

PROCESSES = 8  # allowed on any machine; as many as cores on a larger one
# Arguments that the program supplies where the section leaves them out
SUPPLIED = {"params", "spec", "inputs", "network", "num_tasks", "num_experts", "input_dim", "seed"}
MODULES = ("bottom", "gate", "experts", "heads", "permutation", "weighting")
REFERENCE = re.compile(r"\$\{(\w[\w.]*)\}")  # ${recipe.k}
REFERRED = re.compile(r"\$\{(?:oc\.select:)?\.*([\w.]+)(?![\w.]*:)")  # the beginning of any reference

Path = tuple[Any, ...]  # keys from the root: names, and indices of lists


def check(cfg: DictConfig, overrides: Sequence[str] = ()) -> None:
    """Raise InputError, with one sentence for each of the first few problems, if a value of ``cfg`` is wrong.

    ``overrides``: the overrides of the command line; an option that they add must be read somewhere. Classes named by
    ``_target_`` are imported. Nothing is built, and no file is read.
    """
    problems: dict[str, str] = {}
    for problem in _Check(cfg).problems(overrides):
        problems.setdefault(problem.split("=")[0].split(": ")[0], problem)  # one for each option
    if problems:
        raise InputError(in_one_line([*problems.values()]))


def checked_run(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of a run of ``overrides``, with every value checked."""
    with explained(overrides):
        cfg = composed(overrides)
    cfg.run_name, cfg.paths.run_dir = "trial", "."
    check(cfg)
    with_columns(cfg)
    return cfg


class _Check:
    """The configuration as written (``raw``) and with all references resolved (``values``)."""

    def __init__(self, cfg: DictConfig) -> None:
        self.raw: Any = OmegaConf.to_container(cfg, resolve=False)
        for path, value in _nodes(self.raw):
            require(path != ("recipe",) or isinstance(value, dict), f"recipe={format_value(value)}: must be a section")
            require(value != "???", f"{_dotted(path)} is missing; give {_dotted(path)}=...")
        try:
            self.values: Any = OmegaConf.to_container(cfg, resolve=True)
        except Exception as error:  # a resolver may raise anything
            raise InputError(self._unresolved(error)) from None
        for path, value in _nodes(self.values):
            again = isinstance(value, str) and "${" in value  # would be resolved once more
            require(not again, f"{_dotted(path)}={format_value(value)}: write $\\{{ for ${{ that is text")

    def problems(self, overrides: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for each problem."""
        texts = [value for _, value in _nodes(self.raw) if isinstance(value, str)]
        references = {name for text in texts for name in REFERRED.findall(text)}
        read = {name.split(".")[0] for name in references}
        for name, value in self.values.items():
            if name in TOP:
                yield from self.unfit(TOP[name], (name,), value)
            elif name in OBJECTS:
                yield from self._section((name,), value, optional=OBJECTS[name])
            elif name == "recipe":
                yield from self._recipe(value, references)
            elif name in SEVERAL:
                yield from self._several(name, value)
            elif name != "hydra" and name not in read:
                near = suggestion(name, [*TOP, *OBJECTS, *SEVERAL, "recipe"])
                yield f"{name}: there is no such section or option{near or ', and nothing refers to it'}"
        for name in (*(name for name, optional in OBJECTS.items() if not optional), "callbacks"):
            if name not in self.values:
                yield f"{name}: this section is missing; choose one with {name}=NAME"
        yield from _too_many_processes(self.values.get("trainer"))
        yield from self._unread(overrides, references)

    def unfit(self, annotation: Any, path: Path, value: Any) -> Iterator[str]:
        """Yield a sentence for each way in which the ``value`` at ``path`` does not fit ``annotation``."""
        check = adapter(annotation)
        plain, problems = _described(value), []
        for form in (_described(value, tuple), plain):  # YAML has no tuples
            try:
                if check is not None:
                    check.validate_python(form)
                return
            except ValidationError as error:
                problems = sentences(error, annotation, self._location(path), plain)
        yield from problems

    def _location(self, path: Path) -> str:
        """Return where the value at ``path`` is written: "recipe.k" for ``gate.k``, which is ``${recipe.k}``."""
        node = self.raw
        for index, key in enumerate(path, 1):
            node = node.get(key) if isinstance(node, dict) else node[int(key)] if isinstance(node, list) else None
            if isinstance(node, str) and (match := REFERENCE.fullmatch(node)):
                return self._location((*match[1].split("."), *path[index:]))
        return _dotted(path)

    def _section(self, path: Path, value: Any, optional: bool) -> Iterator[str]:
        """Yield the problems of a section that describes an object, and of all objects inside."""
        if value is None and optional:
            return
        if isinstance(value, dict) and "_target_" in value:
            for at, node in _nodes(value, path):
                if isinstance(node, dict) and "_target_" in node:
                    yield from self._object(at, node)
            return
        location = self._location(path)
        choose = f"; choose one with {location}=NAME" if len(path) == 1 else ""
        or_null = " or null" if optional else ""
        yield f"{location}={format_value(value)}: must be a section with _target_{or_null}{choose}"

    def _object(self, path: Path, section: dict[str, Any]) -> Iterator[str]:
        """Yield the problems of one section with ``_target_``: of its class, and of the options that it gives."""
        try:
            target = find(section["_target_"], self._location((*path, "_target_")))
        except InputError as error:
            yield str(error)
            return
        if path[-1] in MODULES and isinstance(target, type) and not issubclass(target, nn.Module):
            yield f"{self._location((*path, '_target_'))}: must name a Module of torch, or a function that makes one"
        if path == ("network",) and isinstance(target, type) and not issubclass(target, MultiTaskNetwork):
            yield "network._target_: must name a mtl.MultiTaskNetwork, or a function that makes one; see docs/extend.md"
        accepted, closed = options(target)
        for name, value in section.items():
            if name in HYDRA:
                yield from self.unfit(HYDRA[name], (*path, name), value)
            elif name in accepted:
                yield from self.unfit(accepted[name], (*path, name), value)
            elif closed and name != "_target_":
                names = [other for other in accepted if other in section or other not in SUPPLIED]
                near, title = suggestion(name, names), getattr(target, "__name__", str(target))
                has = f"{f'{near} It' if near else '; it'} has {join_names(names)}"
                yield f"{self._location(path)}.{name}: {title} has no option {name}{has}"

    def _several(self, section: str, value: Any) -> Iterator[str]:
        """Yield the problems of a section of callbacks or loggers; there may be no logger."""
        if section == "logger" and (value is None or value is False):
            return
        if not isinstance(value, dict):
            yield f"{section}={format_value(value)}: must be a section of sections; {section}.NAME=null leaves out one"
            return
        for name, child in value.items():
            # Ignore values without a class, such as a recipe's values for a schedule that was not chosen
            if child is not False and (not isinstance(child, dict) or "_target_" in child):
                yield from self._section((section, name), child, optional=True)

    def _recipe(self, value: Any, references: set[str]) -> Iterator[str]:
        read = {reference.split(".")[1] for reference in references if reference.startswith("recipe.")}
        for name in value.keys() - read:
            if near := suggestion(name, read, "recipe.", 0.8):
                yield f"recipe.{name}: nothing refers to it{near}"

    def _unread(self, overrides: Sequence[str], references: set[str]) -> Iterator[str]:
        """Yield a sentence for each option that an override such as ``+recipe.more=1`` adds and that nothing reads.

        Options of objects are checked elsewhere, and null is always allowed.
        """
        for override in overrides:
            key = key_of(override)
            names = tuple(key.split("."))
            along = [value for path, value in _nodes(self.raw) if path == names[: len(path)]]
            added = override.startswith("+") and len(along) == len(names) + 1 and along[-1] is not None
            described = any(isinstance(value, dict) and "_target_" in value for value in along)
            read = any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in references)
            if added and not (described or read or names[0] in TOP.keys() - {"paths"}) and len(names) > 1:
                yield f"{key}: nothing reads this option; leave it out"

    def _unresolved(self, error: Exception) -> str:
        """Return the sentence for a reference that cannot be resolved: OmegaConf's, and where the reference is."""
        if isinstance(error, RecursionError):
            return "the configuration refers to itself; give one of its options a value of its own"
        text, key = first_line(error).rpartition("while resolving interpolation: ")[2], getattr(error, "full_key", "")
        missing = re.search(r"key '?([^']+)'? not found", text)
        near = suggestion(missing[1], [_dotted(path) for path, _ in _nodes(self.raw)]) if missing else ""
        return f"{f'{key}: ' if key else ''}{text}{near}"


def find(path: Any, location: str) -> Any:
    """Import what ``path`` names; raise InputError, which names the option ``location``, if that fails."""
    require(isinstance(path, str), f"{location}={format_value(path)}: must be text, the dotted name of a class")
    module, _, name = path.rpartition(".")
    try:
        try:
            holder: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            holder = pkgutil.resolve_name(module)  # a class, whose method is named
        target = getattr(holder, name)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        extra = "; pip install -e '.[weighting]'" if "'torchjd'" in str(error) else ""
        raise InputError(f"{location}={format_value(path)}: cannot be imported: {first_line(error)}{extra}") from None
    require(callable(target), f"{location}={path}: must name a class or a function, not a {type(target).__name__}")
    return target


@cache
def options(target: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Return the annotations of the options of a class or function, and whether this list is complete.

    A class of this program that takes ``**common`` has the options of its base class as well.
    """
    functions: list[Any] = [target]
    if isinstance(target, type):
        functions = [vars(cls)["__init__"] for cls in target.__mro__ if "__init__" in vars(cls)]
    annotations: dict[str, Any] = {}
    for function in functions:
        try:
            declared, parameters = options_of(function), inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # written in C
            return annotations, False
        inner = inspect.unwrap(function)
        module = str(getattr(inner, "__module__", ""))
        name = f"{module}.{getattr(inner, '__qualname__', '')}".removesuffix(".__init__")
        table = FOREIGN.get(name, {})
        if "lr" in declared and module.startswith("torch.optim."):  # 0 is no error there
            table = {"lr": Positive}
        annotations = {**declared, **table, **annotations}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return annotations, True
        if module.split(".")[0] != "mtl":
            break
    return annotations, False


def _too_many_processes(trainer: Any) -> Iterator[str]:
    """Yield a sentence if a CPU is asked for more processes than make sense; Lightning counts GPUs itself."""
    section = trainer if isinstance(trainer, dict) else {}
    devices, accelerator = str(section.get("devices", "auto")), section.get("accelerator", "auto")
    most = max(PROCESSES, os.cpu_count() or 1)
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.device_count())
    if on_cpu and devices.isdecimal() and int(devices) > most:
        yield f"trainer.devices={devices}: more processes than CPU cores only slow each other down; give at most {most}"


def _described(value: Any, lists: Callable[[list[Any]], Any] = list) -> Any:
    """Return ``value`` with ``UnbuiltObject`` in place of each section with ``_target_``."""
    if isinstance(value, dict):
        if "_target_" in value:
            return UnbuiltObject()
        return {key: _described(child, lists) for key, child in value.items()}
    return lists([_described(child, lists) for child in value]) if isinstance(value, list) else value


def _nodes(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield ``value``, at ``path``, and everything within it."""
    yield path, value
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _nodes(child, (*path, key))


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))
