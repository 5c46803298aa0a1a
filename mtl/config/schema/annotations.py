"""Find out from its annotations what a class or function accepts."""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from mtl.checks import InputError, require
from mtl.config.schema import tables
from mtl.kinds import (
    Choice,
    Described,
    Fields,
    Flag,
    Kind,
    ListOf,
    MapOf,
    Null,
    Number,
    OneOf,
    Row,
    Text,
    Whole,
    shown,
    suggestion,
)

OWN = ("mtl",)  # a class of these passes all its ** to its base class
PLAIN: dict[Any, Kind] = {
    bool: Flag(),
    int: Whole(),
    float: Number(),
    str: Text(),
    Path: Text(),
    PathLike: Text(),
    type(None): Null(),
    None: Null(),
    Tensor: Described(),
    list: ListOf(),
    tuple: ListOf(),
    dict: MapOf(),
}
EXTRAS = {"torchjd": "weighting"}  # packages that conf/ names, and the extra of this project that brings them
LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
MAPS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


@dataclass(frozen=True)
class Options:
    """The options of a class or function by name, with their kinds (None: anything), in order.

    ``required``: those without a default. ``closed``: there are no others.
    """

    kinds: dict[str, Kind | None]
    required: frozenset[str]
    closed: bool


def find(path: str, where: str) -> Any:
    """Import what ``path`` names; raise InputError, which names the option ``where``, if that fails."""
    names = path.split(".")
    require(all(names), f"{where}={shown(path)}: must be a dotted name, such as mtl.gates.CometGate")
    found: Any = _module(names[0], path, where)
    for index, name in enumerate(names[1:], start=2):
        parent = found
        found = getattr(parent, name, None)
        if found is None and isinstance(parent, types.ModuleType):
            found = _module(".".join(names[:index]), path, where, parent)
        if found is None:
            raise InputError(_absent(where, path, parent, name))
    require(callable(found), f"{where}={path}: must name a class or a function, not a {type(found).__name__}")
    return found


def _module(dotted: str, path: str, where: str, parent: Any = None) -> Any:
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
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(f"{where}={path}: {dotted} cannot be imported: {type(error).__name__}: {reason}") from None


def _absent(where: str, path: str, parent: Any, name: str) -> str:
    prefix = path.rpartition(".")[0]
    holder = getattr(parent, "__name__", prefix)
    near = suggestion(name, [other for other in dir(parent) if not other.startswith("_")], f"{holder}.")
    return f"{where}={path}: there is no {name} in {holder}{near}"


@cache
def options(target: Callable[..., Any]) -> Options:
    """Return the options of a class or function.

    A class that takes ``**common`` has the options of its base class as well.
    """
    kinds: dict[str, Kind | None] = {}
    required: set[str] = set()
    functions: list[Any] = [target]
    if isinstance(target, type):
        functions = [cls.__dict__["__init__"] for cls in target.__mro__ if "__init__" in cls.__dict__]
    for function in functions:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # written in C
            return Options(kinds, frozenset(), False)
        more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        for parameter in parameters[isinstance(target, type) :]:
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or parameter.name in kinds:
                continue
            kinds[parameter.name] = _kind_of_parameter(function, parameter)
            if parameter.default is parameter.empty:
                required.add(parameter.name)
        if not more:
            return Options(kinds, frozenset(required), True)
        kinds = {**tables.of_class(owner(function)), **kinds}
        if str(getattr(function, "__module__", "")).split(".")[0] not in OWN:
            break
    return Options(kinds, frozenset(), False)


def owner(function: Any) -> str:
    """Return the dotted name of the class whose constructor ``function`` is, or of the function itself."""
    inner = inspect.unwrap(function)
    return f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', '')}".removesuffix(".__init__")


def _kind_of_parameter(function: Any, parameter: inspect.Parameter) -> Kind | None:
    """Return the kind of a parameter; None if it has no annotation, or one that its own default does not fit."""
    inner = inspect.unwrap(function)
    known = tables.of_class(owner(function))
    if parameter.name in known:
        return known[parameter.name]
    if parameter.annotation is parameter.empty:
        return None
    holder = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    try:
        hints = typing.get_type_hints(holder, getattr(inner, "__globals__", {}), include_extras=True)
    except Exception:  # a name that is imported for type checkers alone
        return None
    kind, default = kind_of(hints["it"]), parameter.default
    if kind is None or default is parameter.empty:
        return kind
    if default is None:
        return OneOf((kind, Null())) if not kind.accepts(None) else kind
    return kind if kind.accepts(default) else None


def kind_of(annotation: Any) -> Kind | None:
    """Return the kind of values that an annotation means; None if any value may fit."""
    if isinstance(annotation, type(None) | type) and annotation in PLAIN:
        return PLAIN[annotation]
    if typing.is_typeddict(annotation):
        return _fields(annotation)
    if hasattr(annotation, "__supertype__"):  # a NewType
        return kind_of(annotation.__supertype__)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        given = [part for part in arguments[1:] if isinstance(part, Kind)]
        return given[0] if given else kind_of(arguments[0])
    if origin in (typing.Required, typing.NotRequired):
        return kind_of(arguments[0])
    if origin is typing.Literal:
        return Choice(tuple(arguments))
    if origin in (typing.Union, types.UnionType):
        return _union([kind_of(argument) for argument in arguments])
    if origin is tuple and Ellipsis not in arguments:
        return Row(tuple(kind_of(argument) for argument in arguments))
    if origin in LISTS or origin is tuple:
        return ListOf(kind_of(arguments[0]) if arguments else None)
    if origin in MAPS:
        return MapOf(kind_of(arguments[1]) if arguments else None)
    if origin is collections.abc.Callable or annotation is collections.abc.Callable:
        return Described()
    return None


def _union(kinds: list[Kind | None]) -> Kind | None:
    """Return the kind of a union; None if one of its members accepts anything."""
    members: list[Kind] = []
    for kind in kinds:
        if kind is None:
            return None
        members += kind.kinds if isinstance(kind, OneOf) else [kind]
    choices = tuple(value for kind in members if isinstance(kind, Choice) for value in kind.values)
    others: list[Kind] = []
    for kind in members:
        others += [kind] if kind not in others and not isinstance(kind, Choice) else []
    ordered = sorted([*([Choice(choices)] if choices else []), *others], key=lambda kind: isinstance(kind, Null))
    return ordered[0] if len(ordered) == 1 else OneOf(tuple(ordered))


def _fields(annotation: Any) -> Kind:
    hints = typing.get_type_hints(annotation, include_extras=True)
    required = set()
    for name, hint in hints.items():
        origin = typing.get_origin(hint)
        if origin is typing.Required or (annotation.__total__ and origin is not typing.NotRequired):
            required.add(name)
    return Fields({name: kind_of(hint) for name, hint in hints.items()}, frozenset(required))
