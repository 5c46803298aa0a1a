"""What an annotation accepts, as a check by pydantic and in words; and the sentence for a value that does not fit."""

from __future__ import annotations

import collections.abc
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict

LONGEST = 60  # characters of a value that a message repeats
MOST = 4  # problems that one message names
# Strict: true is refused as a number, 1.0 as a whole number, and NaN and infinity everywhere. Classes that pydantic
# does not know are checked by isinstance
CONFIG = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, extra="forbid")
PLAIN: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    None: "null",
    type(None): "null",
    dict: "a section {name: value}",
    list: "a list",
    tuple: "a list",
}
BOUNDS = {"Ge": "of at least", "Gt": "greater than", "Le": "of at most", "Lt": "less than"}
LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Collection)
MAPS = (dict, collections.abc.Mapping)


class Described:
    """A placeholder for an object that a section with ``_target_`` describes and that is not built yet."""


@cache
def adapter(annotation: Any) -> TypeAdapter[Any] | None:
    """Return the validator of ``annotation``; None if it accepts any value or pydantic cannot handle it."""
    if annotation is Any:
        return None
    # These have a configuration of their own
    own = is_typeddict(annotation) or (isinstance(annotation, type) and issubclass(annotation, BaseModel))
    try:
        return TypeAdapter(annotation, config=None if own else CONFIG)
    except Exception:  # a foreign annotation may be anything
        return None


def fits(annotation: Any, value: Any) -> bool:
    """Return whether ``annotation`` accepts ``value``."""
    check = adapter(annotation)
    try:
        return check is None or check.validate_python(value) is not Ellipsis
    except ValidationError:
        return False


def in_one_line(problems: Sequence[str]) -> str:
    """Return the first ``MOST`` of ``problems`` in one line, and the number of the others."""
    more = [f"and {len(problems) - MOST} more"] if len(problems) > MOST else []
    return "; ".join([*problems[:MOST], *more])


def sentences(error: ValidationError, annotation: Any, where: str, value: Any) -> list[str]:
    """Return a sentence for each wrong entry of ``value``, the value of option ``where``: it says what is accepted.

    For a union, only the most deeply nested errors are reported. ``Described`` objects are not checked.
    """
    found: dict[tuple[Any, ...], str] = {}
    for problem in error.errors(include_url=False, include_context=False):
        if holds_described(problem["input"]):
            continue
        place, here, wanted, name = [], value, annotation, where
        for key in problem["loc"]:  # has the entries, and names of the members of unions
            if isinstance(here, Mapping) and key in here:
                name, wanted, here = (f"{name}.{shown(key)}" if name else shown(key)), entry(wanted, key), here[key]
            elif isinstance(here, Sequence) and not isinstance(here, str) and isinstance(key, int) and key < len(here):
                name, wanted, here = f"{name}[{key}]", entry(wanted, key), here[key]
            else:
                continue
            place.append(key)
        last = problem["loc"][-1] if problem["loc"] else ""
        if last == "[key]":  # the name of an entry is wrong, not its value
            *place, key = place if place and place[-1] == problem["input"] else [*place, problem["input"]]
            name = name.removesuffix(f".{shown(key)}")
            wanted = keys_of(entry(annotation, *place))
            found[(*place, key)] = f"{name}: the name {shown(key)} must be {accepted(wanted)}{_hint(key, wanted)}"
            continue
        if problem["type"] == "missing" and not isinstance(last, int):
            found[(*place, last)] = f"{name}={shown(here)}: {last} is missing" if name else f"{last} is missing"
        elif problem["type"] == "extra_forbidden":
            known = fields(entry(annotation, *place[:-1]))
            found[tuple(place)] = f"{name}: no such option{suggestion(last, known) or f'; there are {listed(known)}'}"
        else:
            found[tuple(place)] = f"{name}={shown(here)}: must be {accepted(wanted)}{_hint(here, wanted)}"
    return [text for place, text in found.items() if not any(other[: len(place)] == place != other for other in found)]


def holds_described(value: Any) -> bool:
    """Return whether ``value`` is or contains a ``Described`` object."""
    if isinstance(value, Mapping):
        return any(map(holds_described, value.values()))
    return isinstance(value, Described) or (isinstance(value, list | tuple) and any(map(holds_described, value)))


def members(annotation: Any) -> list[Any]:
    """Return the members of a union, or the annotation itself in a list; ``Annotated`` and the like are removed."""
    origin = typing.get_origin(annotation)
    if origin in (Annotated, typing.Required, typing.NotRequired):
        return members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(annotation) for inner in members(member)]
    return [annotation]


def fields(annotation: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a model or TypedDict; for a union, of all its members."""
    found: dict[str, Any] = {}
    for member in members(annotation):
        if is_typeddict(member) or (isinstance(member, type) and issubclass(member, BaseModel)):
            found |= typing.get_type_hints(member, include_extras=True)
    return found


def keys_of(annotation: Any) -> Any:
    """Return the annotation of the keys of a mapping; Any if it is unknown."""
    sections = [member for member in members(annotation) if typing.get_origin(member) in MAPS]
    return typing.get_args(sections[0])[0] if sections and typing.get_args(sections[0]) else Any


def entry(annotation: Any, *keys: Any) -> Any:
    """Return the annotation of the entry at ``keys`` in a value of type ``annotation``; Any if it is unknown."""
    for key in keys:
        inner: list[Any] = [fields(annotation)[key]] if isinstance(key, str) and key in fields(annotation) else []
        for member in members(annotation):
            origin, arguments = typing.get_origin(member), typing.get_args(member)
            if origin in MAPS and len(arguments) == 2 and not inner:
                inner.append(arguments[1])
            elif origin is tuple and Ellipsis not in arguments and isinstance(key, int) and key < len(arguments):
                inner.append(arguments[key])
            elif origin in LISTS and arguments and isinstance(key, int):
                inner.append(arguments[0])
        annotation = typing.Union[tuple(inner)] if inner else Any  # noqa: UP007
    return annotation


def accepted(annotation: Any) -> str:
    """Say in words what ``annotation`` accepts, such as "a whole number of at least 1"."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        notes = [note for note in arguments[1:] if isinstance(note, FieldInfo)]
        described = [note.description for note in notes if note.description]
        limits = {type(limit).__name__: limit for note in notes for limit in note.metadata}
        words = described[-1] if described else accepted(arguments[0])
        if {"Ge", "Le"} <= limits.keys():
            return f"{words} from {_limit(limits['Ge'])} to {_limit(limits['Le'])}"
        bounds = [f"{word} {_limit(limits[name])}" for name, word in BOUNDS.items() if name in limits]
        shortest = f", {_limit(limits['MinLen'])} or more" if "MinLen" in limits and not described else ""
        return f"{words} {' and '.join(bounds)}".strip() + shortest
    if origin in (typing.Required, typing.NotRequired):
        return accepted(arguments[0])
    if origin is Literal:
        choices = [shown(argument) for argument in arguments]
        some = ", ".join(choices) if len(choices) < 30 else listed(choices)
        return f"one of {some}" if len(choices) > 1 else some
    if origin in (typing.Union, types.UnionType):
        ordered = sorted(arguments, key=lambda argument: argument in (None, type(None)))
        return " or ".join(dict.fromkeys(map(accepted, ordered)))
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)}: {', '.join(map(accepted, arguments))}"
    if origin in LISTS:
        return "a list" + (f", each entry {accepted(arguments[0])}" if arguments[0] is not Any else "")
    if origin in MAPS or fields(annotation):
        return f"a section{f' with {listed(fields(annotation))}' if fields(annotation) else ' {name: value}'}"
    if annotation is Any:
        return "something else"
    if origin is collections.abc.Callable or annotation is Callable:
        return "a function (a section with _target_)"
    return PLAIN.get(annotation) or f"a {getattr(annotation, '__name__', annotation)} (a section with _target_)"


def _limit(limit: Any) -> str:
    value = getattr(limit, next(iter(limit.__dataclass_fields__)))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _hint(value: Any, annotation: Any) -> str:
    """Return the end of a message: how to write the value, or the most similar choice."""
    names = [
        choice
        for member in members(annotation)
        if typing.get_origin(member) is Literal
        for choice in typing.get_args(member)
        if isinstance(choice, str)
    ]
    if isinstance(value, int | float) and not isinstance(value, bool) and str in members(annotation):
        return f"; write \"'{shown(value)}'\""
    lists = [typing.get_args(member)[0] for member in members(annotation) if typing.get_origin(member) in LISTS]
    if not isinstance(value, list | tuple | Mapping) and any(fits(inner, value) for inner in lists):
        return f"; write [{shown(value)}]"
    return suggestion(value, names)


def shown(value: Any) -> str:
    """Return ``value`` as written on a command line, cut to a readable length."""
    try:
        text = _written(value)
    except (ValueError, RecursionError):  # Python refuses to write thousands of digits
        text = f"a number of about {value.bit_length() * 3 // 10:,} digits" if isinstance(value, int) else "..."
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_written(key)}: {_written(child)}' for key, child in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if not isinstance(value, str):
        text = str(value) if isinstance(value, int | float | Path) else f"a {type(value).__name__}"
        return text if text.isprintable() else ascii(text)
    plain = value.isprintable() and value == value.strip() and value.lower() not in ("", "null", "true", "false")
    return value if plain and not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|[-+]?(inf|nan)", value, re.I) else ascii(value)


def suggestion(name: Any, names: Iterable[str], before: str = "", cutoff: float = 0.6) -> str:
    """Return "; did you mean NAME?" with the most similar of ``names``, "" if none is more similar than ``cutoff``."""
    if not isinstance(name, str):
        return ""
    lower = {other.lower(): other for other in names}
    near = difflib.get_close_matches(name.lower(), lower, 1, cutoff)
    return f"; did you mean {before}{lower[near[0]]}?" if near else ""


def listed(names: Iterable[str]) -> str:
    """Return the names with commas, at most twelve of them."""
    names = list(names)
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
