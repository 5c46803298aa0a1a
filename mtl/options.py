"""Check the arguments of constructors against their annotations, with pydantic.

``k: Count`` is all that a constructor states about an option. The decorator ``validated`` turns a wrong value into an
InputError of one sentence, and ``mtl.config.check`` reads the same annotations before anything is built. A plain
``int``, ``bool``, ``Literal`` or class works too; the kinds below add ranges.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import is_typeddict

from mtl.checks import InputError, format_value, in_one_line, suggestion
from mtl.files.cloud import path_of
from mtl.files.escaping import CONTROL, unescape_interpolation

MANY = 1_000_000  # more experts, layers or units than any machine holds
# Strict: true is refused as a number, 1.0 as a whole number, and NaN and infinity everywhere. Classes that pydantic
# does not know are checked by isinstance
CONFIG = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, extra="forbid")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class StrictModel(BaseModel):
    """Base of the models of external data: files, checkpoints, the configuration."""

    model_config = CONFIG


class UnbuiltObject:
    """A placeholder for an object that a section with ``_target_`` describes and that is not built yet."""


def matching(pattern: str, description: str) -> AfterValidator:
    """Return the check that a text matches ``pattern``; ``description`` says what is accepted."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {description}")
        return text

    return AfterValidator(check)


def _path(value: Any) -> Any:
    """Return a path with ``~`` expanded; raise ValueError if it cannot be one."""
    if not isinstance(value, str | Path) or not str(value).strip() or CONTROL.search(str(value)):
        raise ValueError("must be a path")
    try:
        expanded = path_of(unescape_interpolation(str(value))).expanduser()
    except RuntimeError as error:
        raise ValueError("must be a path; there is no such user") from error
    return expanded


def _distinct(values: Sequence[Any]) -> list[Any]:
    if any(value in values[:index] for index, value in enumerate(values)):
        raise ValueError("must not have an entry twice")
    return list(values)


Count = Annotated[int, Field(ge=1, le=MANY)]
CountOrZero = Annotated[int, Field(ge=0, le=MANY)]
EnsembleSize = Annotated[int, Field(ge=1, le=1024)]  # networks of an ensemble
LargeCount = Annotated[int, Field(ge=1, le=10**9)]  # rows, batches, steps
LargeCountOrZero = Annotated[int, Field(ge=0, le=10**9)]
LossReduction = Literal["tasks", "labels"]  # what a task's summed loss is divided by, see ``MultiTaskModule``
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]  # what torch.Generator takes
RunSeed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # what Lightning and numpy take
Number = Annotated[float, Field()]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, AfterValidator(unescape_interpolation)]
Name = Annotated[Text, matching(r"(?!\s*$)[^\x00-\x1f\x7f\ud800-\udfff]+", "text in one line, not empty")]
Names = Annotated[Sequence[Name], AfterValidator(_distinct)]
NonEmpty = Annotated[Sequence[T], AfterValidator(_distinct), Field(min_length=1)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Address = Annotated[
    str,
    matching(
        r"https?://[^\s/:?#]+(:\d{1,4}|:[1-5]\d{4}|:6[0-5]\d{3})?(/[^\s\x00-\x1f\x7f]*)?",
        "an http:// or https:// address",
    ),
    AfterValidator(lambda address: address.rstrip("/")),
]
TaskName = Annotated[
    str,
    matching(
        r"(?!\s)(?!.*\$\{)(?!\?{3}$)[^./\\\x00-\x1f\x7f\ud800-\udfff]{1,100}(?<!\s)",
        "text of at most 100 characters without dots, slashes, ${ and control characters, and not ???",
    ),
]
Pair = Annotated[tuple[T, T], Field(strict=False)]  # YAML has lists only


@cache
def adapter(annotation: Any) -> TypeAdapter[Any] | None:
    """Return the validator of ``annotation``; None if it accepts any value or pydantic cannot handle it."""
    if annotation is Any:
        return None
    # These have a configuration of their own
    has_config = is_typeddict(annotation) or (isinstance(annotation, type) and issubclass(annotation, BaseModel))
    try:
        return TypeAdapter(annotation, config=None if has_config else CONFIG)
    except Exception:  # a foreign annotation may be anything
        return None


def fits(annotation: Any, value: Any) -> bool:
    """Return whether ``annotation`` accepts ``value``."""
    check = adapter(annotation)
    try:
        return check is None or check.validate_python(value) is not Ellipsis
    except ValidationError:
        return False


def sentences(error: ValidationError, annotation: Any, location: str, value: Any) -> list[str]:
    """Return a sentence for each wrong entry of ``value``, the value of option ``location``, from pydantic's messages.

    For a union, only the most deeply nested errors are reported. ``UnbuiltObject`` objects are not checked.
    """
    texts_by_path: dict[tuple[Any, ...], list[str]] = {}
    for problem in error.errors(include_url=False, include_context=False):
        if _holds_described(problem["input"]):
            continue
        path, entry, name = list[Any](), value, location
        for key in problem["loc"]:  # has the entries, and names of the members of unions
            if isinstance(entry, Mapping) and key in entry:
                name, entry = f"{name}.{key}" if name else str(key), entry[key]
            elif isinstance(entry, list | tuple) and isinstance(key, int) and key < len(entry):
                name, entry = f"{name}[{key}]", entry[key]
            else:
                continue
            path.append(key)
        last, message = (problem["loc"] or [""])[-1], problem["msg"].removeprefix("Value error, ")
        message = re.sub("^(Input|Value|Tuple|List) should", "must", message, count=1)
        message = re.sub("must be an instance of (Sequence|list)$", "must be a list", message)
        if problem["type"] == "missing":
            path, text = [*path, last], f"{name}.{last} is missing".removeprefix(".")
        elif problem["type"] == "extra_forbidden":
            accepted = set(_field_names(getattr(adapter(annotation), "core_schema", None)))
            text = f"{name}: no such option{suggestion(last, accepted, cutoff=0.7)}"
        elif last == "[key]":
            text = f"{name}: this name {message}{suggestion(problem['input'], _quoted(message))}"
        elif problem["type"] == "string_type" and isinstance(entry, int | float) and not isinstance(entry, bool):
            text = f"{name}={format_value(entry)}: must be text; write \"'{format_value(entry)}'\""
        else:
            text = f"{name}={format_value(entry)}: {message}{suggestion(entry, _quoted(message))}"
        texts_by_path.setdefault(tuple(path), []).append(text)
    deepest = {
        path: texts
        for path, texts in texts_by_path.items()
        if not any(o[: len(path)] == path != o for o in texts_by_path)
    }
    return [
        " or ".join([texts[0], *(text.partition(": must be ")[2] or text for text in dict.fromkeys(texts[1:]))])
        for texts in deepest.values()
    ]


def _holds_described(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_described, value.values()))
    return isinstance(value, UnbuiltObject) or (isinstance(value, list | tuple) and any(map(_holds_described, value)))


def _quoted(message: str) -> list[str]:
    """Return the names that a message of pydantic's lists in quotes."""
    return re.findall("'([^']+)'", message)


def _field_names(schema: Any) -> Iterator[str]:
    """Yield the names of the fields of all models and typed dicts in a schema of pydantic's."""
    if isinstance(schema, dict):
        fields = schema.get("fields")
        yield from fields if isinstance(fields, dict) else ()
    children = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ()
    for child in children:
        yield from _field_names(child)


@cache
def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the named parameters of ``function`` in order, without ``self``."""
    inner = inspect.unwrap(function)
    annotations = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        annotation = _resolved(parameter.annotation, getattr(inner, "__globals__", {}))
        if parameter.default is None and annotation is not Any:
            annotation = typing.Optional[annotation]  # noqa: UP045  (an annotation of typing's has no |)
        if parameter.default is not parameter.empty and not fits(annotation, parameter.default):
            annotation = Any  # it is wrong
        annotations[name] = annotation
    return annotations


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
            check = adapter(options.get(name, Any))
            if check is not None:
                try:
                    bound.arguments[name] = check.validate_python(value)
                except ValidationError as error:
                    problems += sentences(error, options[name], name, value)
        if problems:
            raise InputError(in_one_line(problems))
        return function(*bound.args, **bound.kwargs)

    return typing.cast(F, checked)


def valid(annotation: Any, value: Any, location: str) -> Any:
    """Return ``value``, converted as ``annotation`` says; raise InputError, which names ``location``, if that fails."""
    check = adapter(annotation)
    try:
        return value if check is None else check.validate_python(value)
    except ValidationError as error:
        raise InputError(in_one_line(sentences(error, annotation, location, value))) from None
