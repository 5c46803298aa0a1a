"""Check the arguments of constructors against their annotations, with pydantic.

``k: Count`` is all that a constructor states about an option. The decorator ``validated`` turns a wrong value into an
InputError of one sentence, and ``mtl.config.check`` reads the same annotations before anything is built. A plain
``int``, ``bool``, ``Literal`` or class works too; the kinds below add ranges.
"""

from __future__ import annotations

import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError

from mtl.annotations import CONFIG, adapter, fits, in_one_line, sentences
from mtl.checks import InputError

MANY = 1_000_000  # more experts, layers or units than any machine holds
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Model(BaseModel):
    """Base of the models of external data: files, checkpoints, the configuration."""

    model_config = CONFIG


def _path(value: Any) -> Any:
    """Return a path with ``~`` expanded; raise ValueError if the system does not allow such a path."""
    if not isinstance(value, str | Path) or not str(value).strip() or CONTROL.search(str(value)):
        raise ValueError
    try:
        expanded = Path(value).expanduser()
    except RuntimeError as error:  # ~name of an unknown user
        raise ValueError from error
    if len(os.fsencode(expanded)) > 4000 or any(len(os.fsencode(part)) > 255 for part in expanded.parts):
        raise ValueError
    return expanded


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError
    return value


def _distinct(values: Sequence[Any]) -> list[Any]:
    if any(value in values[:index] for index, value in enumerate(values)):
        raise ValueError
    return list(values)


Count = Annotated[int, Field(ge=1, le=MANY)]
CountOrZero = Annotated[int, Field(ge=0, le=MANY)]
Long = Annotated[int, Field(ge=1, le=10**9)]  # rows, batches, steps
LongOrZero = Annotated[int, Field(ge=0, le=10**9)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]  # what torch.Generator takes
RunSeed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # what Lightning and numpy take
Number = Annotated[float, Field()]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
InnerShare = Annotated[float, Field(gt=0, lt=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[
    str, Field(pattern=r"^[^\x00-\x1f\x7f]*[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]*$", description="non-empty text")
]
Names = Annotated[
    Sequence[Name],
    AfterValidator(_distinct),
    Field(description="a list of distinct texts; put numbers, true, false and null in quotes"),
]
Some = Annotated[
    Sequence[T],
    AfterValidator(_distinct),
    Field(min_length=1, description="a list of distinct names, at least one"),
]
FilePath = Annotated[Path, BeforeValidator(_path), Field(description="a path")]
Address = Annotated[
    str,
    Field(
        pattern=r"^https?://[^\s/:?#]+(:\d{1,4}|:[1-5]\d{4}|:6[0-5]\d{3})?(/[^\s\x00-\x1f\x7f]*)?$",
        description="an http:// or https:// address",
    ),
    AfterValidator(lambda address: address.rstrip("/")),
]
TaskName = Annotated[
    str,
    Field(
        max_length=100,
        pattern=r"^[^\s./\\\x00-\x1f\x7f]([^./\\\x00-\x1f\x7f]*[^\s./\\\x00-\x1f\x7f])?$",
        description="text of at most 100 characters without dots, slashes and control characters",
    ),
]
Chosen = Annotated[T, BeforeValidator(_no_switch)]  # for a Literal of numbers: refuses true, which equals 1
Pair = Annotated[tuple[T, T], Field(strict=False)]  # YAML has lists only


@dataclass(frozen=True)
class Option:
    """An option of a constructor; ``adapter`` validates its values (None: any value is accepted)."""

    annotation: Any
    adapter: TypeAdapter[Any] | None
    required: bool


@cache
def options_of(function: Callable[..., Any]) -> dict[str, Option]:
    """Return the named parameters of ``function`` in order, without ``self``."""
    inner = inspect.unwrap(function)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        annotation = _resolved(parameter.annotation, getattr(inner, "__globals__", {}))
        if parameter.default is None and annotation is not Any:
            annotation = annotation | None if isinstance(annotation, type) else typing.Optional[annotation]  # noqa: UP045
        required = parameter.default is parameter.empty
        if not required and not fits(annotation, parameter.default):  # the annotation is wrong
            annotation = Any
        found[name] = Option(annotation, adapter(annotation), required)
    return found


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["it"]
    except Exception:  # a name that is imported for type checkers alone
        return Any


def validated(function: F) -> F:
    """Decorate a function or constructor to raise InputError for arguments that do not fit its annotations.

    On a class, such as a dataclass, it decorates the constructor.
    """
    if isinstance(function, type):
        function.__init__ = validated(function.__init__)  # type: ignore[misc]  # a class is more than a Callable to mypy
        return function
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises Python's own TypeError
        options, problems = options_of(function), []
        for name, value in bound.arguments.items():
            option = options.get(name)
            if option is not None and option.adapter is not None:
                try:
                    bound.arguments[name] = option.adapter.validate_python(value)
                except ValidationError as error:
                    problems += sentences(error, option.annotation, name, value)
        if problems:
            raise InputError(in_one_line(problems))
        return function(*bound.args, **bound.kwargs)

    return typing.cast(F, checked)


def valid(annotation: Any, value: Any, where: str) -> Any:
    """Return ``value``, converted as ``annotation`` says; raise InputError, which names ``where``, if that fails."""
    check = adapter(annotation)
    try:
        return value if check is None else check.validate_python(value)
    except ValidationError as error:
        raise InputError(in_one_line(sentences(error, annotation, where, value))) from None
