"""Check the composed configuration before anything is built: types, ranges, choices, names.

What a class accepts follows from the annotations of its constructor (see ``mtl.options``), so a new gate, network or
data set needs no entry here. ``mtl.config.accepted`` covers options that belong to no class, and options that
Lightning does not check.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError
from torch import nn

from mtl.annotations import Described, adapter, in_one_line, listed, sentences, shown, suggestion
from mtl.checks import InputError, first_line, require
from mtl.config.accepted import FOREIGN, HYDRA, OBJECTS, SEVERAL, TOP
from mtl.options import Option, Positive, options_of

PROCESSES = 8  # allowed on any machine; as many as cores on a larger one
FACTORIES = (  # have _partial_: true
    *("bottom", "gate", "experts", "heads", "permutation"),
    *("optimizer", "table_optimizer", "weighting"),
)
BUILT = ("data", "trainer", *SEVERAL)  # built completely, without _partial_
# Arguments that the program supplies where the section leaves them out
SUPPLIED = {"params", "spec", "inputs", "network", "num_tasks", "num_experts", "input_dim", "seed"}
EXTRAS = {"torchjd": "weighting"}  # packages that conf/ names, and the extra of this project that installs them
REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # ${recipe.k}
REFERRED = re.compile(r"\$\{(?:oc\.select:)?\.*([\w.]+)(?![\w.]*:)")  # the beginning of any reference

Path = tuple[Any, ...]  # keys from the root: names, and indices of lists


def check(cfg: DictConfig, words: Sequence[str] = ()) -> None:
    """Raise InputError, with one sentence for each of the first few problems, if a value of ``cfg`` is wrong.

    ``words``: the words of the command line; an option that they add must be used somewhere. Classes named by
    ``_target_`` are imported. Nothing is built, and no file is read.
    """
    found: dict[str, str] = {}
    for problem in _Check(cfg).problems(words):
        found.setdefault(problem.split("=")[0].split(": ")[0], problem)  # one for each option
    if found:
        raise InputError(in_one_line([*found.values()]))


class _Check:
    """The configuration as written (``raw``) and with all references resolved (``values``)."""

    def __init__(self, cfg: DictConfig) -> None:
        self.raw: Any = OmegaConf.to_container(cfg, resolve=False)
        for path, value in _nodes(self.raw):
            require(path != ("recipe",) or isinstance(value, dict), f"recipe={shown(value)}: must be a section")
            require(value != "???", f"{_dotted(path)} is missing; give {_dotted(path)}=...")
        try:
            self.values: Any = OmegaConf.to_container(cfg, resolve=True)
        except Exception as error:  # a resolver may raise anything
            raise InputError(self._unresolved(error)) from None

    def problems(self, words: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for each problem."""
        texts = [value for _, value in _leaves(self.raw) if isinstance(value, str)]
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
                known = [*TOP, *OBJECTS, *SEVERAL, "recipe"]
                near = self._elsewhere(name) or suggestion(name, known) or ", and nothing refers to it"
                yield f"{name}: there is no such section or option{near}"
        for name in ("data", "network", "optimizer", "trainer", "callbacks"):
            if name not in self.values:
                yield f"{name}: this section is missing; choose one with {name}=NAME"
        yield from _too_many_processes(self.values.get("trainer"))
        yield from self._unread(words, references)

    def unfit(self, annotation: Any, path: Path, value: Any) -> Iterator[str]:
        """Yield a sentence for each way in which the ``value`` at ``path`` does not fit ``annotation``."""
        check = adapter(annotation)
        plain, found = _described(value), []
        for form in (_described(value, tuple), plain):  # YAML has no tuples
            try:
                if check is not None:
                    check.validate_python(form)
                return
            except ValidationError as error:
                found = sentences(error, annotation, self._where(path), plain)
        yield from found

    def _where(self, path: Path) -> str:
        """Return where the value at ``path`` is written: "recipe.k" for ``gate.k``, which is ``${recipe.k}``."""
        keys, here = list(path), self.raw
        place: list[Any] = []
        for _ in range(100):
            match = REFERENCE.fullmatch(here) if isinstance(here, str) else None
            if match and _has(self.raw, names := match[1].split(".")):
                here, place, keys = self.raw, [], [*names, *keys]
            elif keys and isinstance(here, dict | list):
                key = keys.pop(0)
                place.append(key)
                here = None if not _has(here, [key]) else here[int(key)] if isinstance(here, list) else here[key]
            else:
                break
        return _dotted([*place, *keys])

    def _section(self, path: Path, value: Any, optional: bool) -> Iterator[str]:
        """Yield the problems of a section that describes an object, and of all objects inside."""
        where, name = self._where(path), str(path[0])
        if value is None and optional:
            return
        if not isinstance(value, dict) or "_target_" not in value:
            choose = f"; choose one with {where}=NAME" if len(path) == 1 else ""
            yield f"{where}={shown(value)}: must be a section with _target_{' or null' if optional else ''}{choose}"
            return
        partial = value.get("_partial_") is True
        if partial and name in BUILT:
            yield f"{where}._partial_=true: must be false, since this section is built as it stands"
        objects = ((at, node) for at, node in _nodes(value, path) if isinstance(node, dict) and "_target_" in node)
        inside = [problem for at, node in objects for problem in self._object(at, node)]
        yield from inside
        if inside:
            return
        target = find(value["_target_"], f"{where}._target_")
        if name in FACTORIES and isinstance(target, type) and issubclass(target, nn.Module | torch.optim.Optimizer):
            if not partial:
                yield f"{where}._partial_=false: must be true; its sizes are filled in later"
        elif name in BUILT and "_args_" not in value:
            missing = [key for key, option in options(target)[0].items() if option.required and key not in value]
            if missing:
                yield f"{where}: {target.__name__} needs {', '.join(missing)}; give {where}.{missing[0]}=..."

    def _object(self, path: Path, section: dict[str, Any]) -> Iterator[str]:
        """Yield the problems of one section with ``_target_``: of its class, and of the options that it gives."""
        where = self._where((*path, "_target_"))
        if not isinstance(section["_target_"], str):
            yield f"{where}={shown(section['_target_'])}: must be text, the dotted name of a class"
            return
        try:
            target = find(section["_target_"], where)
        except InputError as error:
            yield str(error)
            return
        known, closed = options(target)
        for name, value in section.items():
            if name in HYDRA:
                yield from self.unfit(HYDRA[name], (*path, name), value)
            elif name in known:
                yield from self.unfit(known[name].annotation, (*path, name), value)
            elif closed and name != "_target_":
                names = [other for other in known if other in section or other not in SUPPLIED]
                near, title = suggestion(name, names), getattr(target, "__name__", str(target))
                has = f"{f'{near} It' if near else '; it'} has {listed(names)}"
                yield f"{self._where(path)}.{name}: {title} has no option {name}{has}"

    def _several(self, section: str, value: Any) -> Iterator[str]:
        """Yield the problems of a section of callbacks or loggers; there may be no logger."""
        if section == "logger" and (value is None or value is False):
            return
        if not isinstance(value, dict):
            yield f"{section}={shown(value)}: must be a section of sections; {section}.NAME=null leaves out one"
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

    def _unread(self, words: Sequence[str], references: set[str]) -> Iterator[str]:
        """Yield a sentence for each option that a word such as ``+recipe.more=1`` adds and that nothing reads.

        Options of objects are checked elsewhere, and null is always allowed.
        """
        for word in words:
            key = word.lstrip("+").partition("=")[0]
            names, nodes = key.split("."), [self.raw]
            for name in names:
                nodes.append(nodes[-1].get(name) if isinstance(nodes[-1], dict) else None)
            read = any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in references)
            described = any(isinstance(node, dict) and "_target_" in node for node in nodes)
            if word.startswith("+") and len(names) > 1 and nodes[-1] is not None and not read and not described:
                yield f"{key}: nothing reads this option{self._elsewhere(names[-1], key) or '; leave it out'}"

    def _elsewhere(self, name: str, but: str = "") -> str:
        """Return "; did you mean KEY?" with another option of this name, "" if there is none."""
        keys = [_dotted(path) for path, _ in _nodes(self.raw) if len(path) > 1 and path[-1] == name]
        near = min(
            (key for key in keys if key != but),
            key=lambda key: (self._where(tuple(key.split("."))) != key, key),
            default="",
        )
        return f"; did you mean {near}?" if near else ""

    def _unresolved(self, error: Exception) -> str:
        """Return the sentence for a reference that cannot be resolved: OmegaConf's, and where the reference is."""
        text, near = first_line(error).rpartition("while resolving interpolation: ")[2], ""
        references = {_dotted(path): value for path, value in _leaves(self.raw) if "${" in str(value)}
        key = str(getattr(error, "full_key", None) or "")
        if isinstance(error, RecursionError) or "recursi" in text.lower() or "parent node" in text:
            key, text = key or next(iter(references)), "refers to itself; give it a value of its own"
        if missing := re.search(r"key '?([^']+)'? not found", text):
            key = key or next((name for name, value in references.items() if f"${{{missing[1]}}}" in value), "")
            choose = f"; choose one with {missing[1]}=NAME" if missing[1] in OBJECTS else ""
            near = choose or suggestion(missing[1], [_dotted(path) for path, _ in _nodes(self.raw)])
        return f"{key}={shown(references[key])}: {text}{near}" if key in references else f"{text}{near}"


def find(path: str, where: str) -> Any:
    """Import what ``path`` names; raise InputError, which names the option ``where``, if that fails."""
    names = path.split(".")
    require(all(names), f"{where}={shown(path)}: must be a dotted name, such as mtl.gates.CometGate")
    found: Any = None
    for index, name in enumerate(names, start=1):
        parent, found = found, getattr(found, name, None)
        if found is None and (parent is None or isinstance(parent, types.ModuleType)):
            found = _module(".".join(names[:index]), path, where, parent)
        if found is None:
            holder = getattr(parent, "__name__", path.rpartition(".")[0])
            near = suggestion(name, [other for other in dir(parent) if not other.startswith("_")], f"{holder}.")
            raise InputError(f"{where}={path}: there is no {name} in {holder}{near}")
    require(callable(found), f"{where}={path}: must name a class or a function, not a {type(found).__name__}")
    return found


def _module(dotted: str, path: str, where: str, parent: Any) -> Any:
    """Return the module ``dotted``, the first part of ``path``; None if ``parent`` has no such module."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if parent is not None and error.name == dotted:
            return None
        extra = EXTRAS.get(str(error.name))
        advice = f"pip install -e '.[{extra}]'" if extra else "install it, or add its folder to PYTHONPATH"
        raise InputError(f"{where}={path}: there is no module {shown(error.name)}; {advice}") from None
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise InputError(
            f"{where}={path}: {dotted} cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from None


@cache
def options(target: Callable[..., Any]) -> tuple[dict[str, Option], bool]:
    """Return the options of a class or function, and whether this list is complete.

    A class of this program that takes ``**common`` has the options of its base class as well.
    """
    functions: list[Any] = [target]
    if isinstance(target, type):
        functions = [vars(cls)["__init__"] for cls in target.__mro__ if "__init__" in vars(cls)]
    known: dict[str, Option] = {}
    for function in functions:
        try:
            own, parameters = options_of(function), inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # written in C
            return known, False
        inner = inspect.unwrap(function)
        module = str(getattr(inner, "__module__", ""))
        name = f"{module}.{getattr(inner, '__qualname__', '')}".removesuffix(".__init__")
        table = FOREIGN.get(name, {})
        table = {"lr": Positive} if "lr" in own and module.startswith("torch.optim.") else table  # 0 is no error there
        exact = {key: Option(kind, None, key in own and own[key].required) for key, kind in table.items()}
        known = {**own, **exact, **known}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return known, True
        if module.split(".")[0] != "mtl":
            break
    return known, False


def _too_many_processes(trainer: Any) -> Iterator[str]:
    """Yield a sentence if a CPU is asked for more processes than make sense; Lightning counts GPUs itself."""
    section = trainer if isinstance(trainer, dict) else {}
    devices, accelerator = str(section.get("devices", "auto")), section.get("accelerator", "auto")
    most = max(PROCESSES, os.cpu_count() or 1)
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.device_count())
    if on_cpu and devices.isdecimal() and int(devices) > most:
        yield f"trainer.devices={devices}: more processes than CPU cores only slow each other down; give at most {most}"


def _described(value: Any, lists: Callable[[list[Any]], Any] = list) -> Any:
    """Return ``value`` with ``Described`` in place of each section with ``_target_``."""
    if isinstance(value, dict):
        return Described() if "_target_" in value else {key: _described(child, lists) for key, child in value.items()}
    return lists([_described(child, lists) for child in value]) if isinstance(value, list) else value


def _nodes(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield ``value``, at ``path``, and everything inside of it."""
    yield path, value
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _nodes(child, (*path, key))


def _leaves(raw: Any) -> Iterator[tuple[Path, Any]]:
    return ((path, value) for path, value in _nodes(raw) if not isinstance(value, dict | list))


def _has(value: Any, names: Sequence[Any]) -> bool:
    """Return whether there is a value at ``names``, or a reference that may lead to one."""
    for name in names:
        if isinstance(value, str) and "${" in value:
            return True
        if isinstance(value, list) and str(name).isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return False
    return True


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))
