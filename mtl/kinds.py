"""What a value of the configuration may be: kinds, and annotations that carry them.

A constructor says what it accepts with its annotations: ``dropout: Dropout = 0.0``, ``units: Sequence[Count] = ()``.
``mtl.config.schema`` reads them and reports a wrong value before anything is built. A plain ``int`` or ``str`` works;
the kinds below add ranges and choices.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from os import PathLike
from typing import Annotated, Any

MANY = 1_000_000  # more experts, layers or units than any machine holds
LONGEST = 60  # characters of a value that a message repeats


class Kind:
    """A set of values, and the words for it."""

    @property
    def text(self) -> str:
        """The words for this kind, such as "a whole number of at least 1"."""
        raise NotImplementedError

    def accepts(self, value: Any) -> bool:
        """Return whether the plain ``value`` (null, a scalar, a list, a dict) is of this kind."""
        raise NotImplementedError

    def problems(self, where: str, value: Any) -> Iterator[str]:
        """Yield a sentence for each thing that is wrong with the ``value`` of option ``where``.

        An object that the configuration describes, a dict with ``_target_``, is accepted: its value is not known yet.
        """
        if not is_object(value) and not self.accepts(value):
            yield f"{where}={shown(value)}: must be {self.text}{self.hint(value)}"

    def hint(self, value: Any) -> str:
        """Return what else a message says about ``value``: "", or how to write it."""
        return ""


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number from ``low`` to ``high``."""

    low: int | None = None
    high: int | None = None

    @property
    def text(self) -> str:
        if self.low is not None and self.high is not None:
            return f"a whole number from {self.low:,} to {self.high:,}"
        return "a whole number" if self.low is None else f"a whole number of at least {self.low:,}"

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def hint(self, value: Any) -> str:
        whole = isinstance(value, float) and value.is_integer() and self.accepts(int(value))
        return f"; write {int(value)}" if whole else ""


@dataclass(frozen=True)
class Number(Kind):
    """A finite number from ``low`` to ``high``; ``above`` and ``below`` exclude these themselves."""

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False

    @property
    def text(self) -> str:
        bounds = []
        if self.low is not None:
            bounds.append(f"greater than {self.low:g}" if self.above else f"of at least {self.low:g}")
        if self.high is not None:
            bounds.append(f"less than {self.high:g}" if self.below else f"at most {self.high:g}")
        return f"a number {' and '.join(bounds)}" if bounds else "a finite number"

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        try:
            number = float(value)
        except OverflowError:  # an integer beyond 1.8e308
            return False
        if not math.isfinite(number):
            return False
        large = self.low is None or number > self.low or (number == self.low and not self.above)
        return large and (self.high is None or number < self.high or (number == self.high and not self.below))

    def hint(self, value: Any) -> str:
        infinite = isinstance(value, float) and not math.isfinite(value)
        return "; inf and nan are not accepted" if infinite else ""


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    @property
    def text(self) -> str:
        return "true or false"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class Text(Kind):
    """Text of at least ``low`` characters; a path is text."""

    low: int = 0

    @property
    def text(self) -> str:
        return "text" if self.low == 0 else "non-empty text"

    def accepts(self, value: Any) -> bool:
        if isinstance(value, PathLike):
            return True
        return isinstance(value, str) and len(value) >= self.low and "\0" not in value

    def hint(self, value: Any) -> str:
        number = isinstance(value, int | float) and not isinstance(value, bool) and len(shown(value)) < LONGEST
        return f"; write \"'{value}'\"" if number else ""


@dataclass(frozen=True)
class Choice(Kind):
    """One of ``values``."""

    values: tuple[Any, ...]

    @property
    def text(self) -> str:
        names = list({str(value): shown(value) for value in self.values}.values())
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]

    def accepts(self, value: Any) -> bool:
        return any(type(value) is type(choice) and value == choice for choice in self.values)

    def hint(self, value: Any) -> str:
        return suggestion(value, [choice for choice in self.values if isinstance(choice, str)])


@dataclass(frozen=True)
class Null(Kind):
    """Null."""

    @property
    def text(self) -> str:
        return "null"

    def accepts(self, value: Any) -> bool:
        return value is None


@dataclass(frozen=True)
class OneOf(Kind):
    """Any of several kinds."""

    kinds: tuple[Kind, ...]

    @property
    def text(self) -> str:
        return " or ".join(kind.text for kind in self.kinds)

    def accepts(self, value: Any) -> bool:
        return any(kind.accepts(value) for kind in self.kinds)

    def problems(self, where: str, value: Any) -> Iterator[str]:
        wanted = ListOf if isinstance(value, list | tuple) else (MapOf, Fields) if isinstance(value, dict) else ()
        inside = [kind for kind in self.kinds if isinstance(kind, wanted)]
        if len(inside) == 1 and not self.accepts(value):  # name the entry that is wrong
            return inside[0].problems(where, value)
        return super().problems(where, value)

    def hint(self, value: Any) -> str:
        return next(filter(None, (kind.hint(value) for kind in self.kinds)), "")


@dataclass(frozen=True)
class ListOf(Kind):
    """A list whose entries are of one kind (None: of any), with ``low`` entries or more."""

    kind: Kind | None = None
    low: int = 0

    @property
    def text(self) -> str:
        entries = "" if self.kind is None else f", each entry {self.kind.text}"
        return ("a list" if self.low == 0 else f"a list of at least {self.low}") + entries

    def accepts(self, value: Any) -> bool:
        return not any(self.problems("", value))

    def problems(self, where: str, value: Any) -> Iterator[str]:
        if is_object(value):
            return
        if not isinstance(value, list | tuple) or len(value) < self.low:
            yield f"{where}={shown(value)}: must be {self.text}{self.hint(value)}"
        elif self.kind is not None:
            for index, entry in enumerate(value):
                yield from self.kind.problems(f"{where}[{index}]", entry)

    def hint(self, value: Any) -> str:
        single = not isinstance(value, list | tuple | dict) and self.kind is not None and self.kind.accepts(value)
        return f"; write [{shown(value)}]" if single else ""


@dataclass(frozen=True)
class Row(Kind):
    """A list with one entry of each of the ``kinds``, in order (None: of any kind)."""

    kinds: tuple[Kind | None, ...]

    @property
    def text(self) -> str:
        entries = ", ".join("anything" if kind is None else kind.text for kind in self.kinds)
        return f"a list of {len(self.kinds)}: {entries}"

    def accepts(self, value: Any) -> bool:
        fits = isinstance(value, list | tuple) and len(value) == len(self.kinds)
        pairs = zip(self.kinds, value, strict=True) if fits else ()
        return fits and all(kind is None or is_object(entry) or kind.accepts(entry) for kind, entry in pairs)


@dataclass(frozen=True)
class MapOf(Kind):
    """A section whose entries are of one kind (None: of any)."""

    kind: Kind | None = None

    @property
    def text(self) -> str:
        return "a section, {name: value, ...}"

    def accepts(self, value: Any) -> bool:
        return not any(self.problems("", value))

    def problems(self, where: str, value: Any) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where}={shown(value)}: must be {self.text}"
        elif not is_object(value) and self.kind is not None:
            yield from chain.from_iterable(self.kind.problems(f"{where}.{key}", child) for key, child in value.items())


@dataclass(frozen=True)
class Fields(Kind):
    """A section with the options ``kinds`` (None: any value), of which ``required`` must be given.

    ``extra``: other options are allowed as well.
    """

    kinds: Mapping[str, Kind | None]
    required: frozenset[str] = field(default=frozenset())
    extra: bool = False

    @property
    def text(self) -> str:
        return f"a section with {', '.join(self.kinds)}"

    def accepts(self, value: Any) -> bool:
        return not any(self.problems("", value))

    def problems(self, where: str, value: Any) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where}={shown(value)}: must be {self.text}"
            return
        if is_object(value):
            return
        for name, child in value.items():
            kind = self.kinds.get(name)
            if kind is not None:
                yield from kind.problems(f"{where}.{name}", child)
            elif name not in self.kinds and not self.extra:
                near = suggestion(name, self.kinds)
                yield f"{where}.{name}: no such option{near or f'; there are {listed(self.kinds)}'}"
        for name in sorted(self.required - value.keys()):
            yield f"{where}={shown(value)}: {name} is missing"


@dataclass(frozen=True)
class Described(Kind):
    """An object, which only a section with ``_target_`` can describe."""

    @property
    def text(self) -> str:
        return "a section with _target_"

    def accepts(self, value: Any) -> bool:
        return is_object(value)


def is_object(value: Any) -> bool:
    """Return whether a plain value describes an object to build."""
    return isinstance(value, dict) and "_target_" in value


def shown(value: Any) -> str:
    """Return ``value`` as a command line would give it, cut to a readable length."""
    try:
        text = _written(value)
    except (ValueError, RecursionError):  # Python refuses to write thousands of digits
        text = f"a number of about {value.bit_length() * 3 // 10:,} digits" if isinstance(value, int) else "..."
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_written(child)}' for key, child in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if not isinstance(value, str):
        return str(value)
    return value if value.isprintable() and not _needs_quotes(value) else repr(value)


def _needs_quotes(text: str) -> bool:
    """Return whether ``text`` without quotes would be read as something else: a number, a flag, null."""
    if text.lower() in ("", "null", "true", "false") or text != text.strip():
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


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


Count = Annotated[int, Whole(1, MANY)]
CountOrZero = Annotated[int, Whole(0, MANY)]
Seed = Annotated[int, Whole(-(2**63), 2**63 - 1)]  # what torch.Generator takes
Positive = Annotated[float, Number(0, above=True)]
NotNegative = Annotated[float, Number(0)]
Share = Annotated[float, Number(0, 1)]
InnerShare = Annotated[float, Number(0, 1, above=True, below=True)]  # neither 0 nor 1
Dropout = Annotated[float, Number(0, 1, below=True)]
