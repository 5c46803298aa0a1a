"""The space of a study: a distribution for each option, and values as words of the command line of mtl train."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalChoiceType,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import Trial

from mtl.checks import InputError, require

FORMS = "a list of values, or {low: ..., high: ...} with log: true or step: ..."


def distributions(space: Mapping[str, Any]) -> dict[str, BaseDistribution]:
    """Return the distribution of each option of ``space``, in the same order; raise InputError if one is wrong."""
    return {key: _distribution(key, described) for key, described in space.items()}


def _distribution(key: str, described: Any) -> BaseDistribution:
    if isinstance(described, list):
        require(len(described) > 0, f"space: {key}=[]: must have at least one value")
        choices: list[CategoricalChoiceType] = [_text(v) if isinstance(v, list | dict) else v for v in described]
        return CategoricalDistribution(choices)
    given = f"space: {key}={described!r}"
    require(isinstance(described, dict) and {"low", "high"} <= set(described), f"{given}: must be {FORMS}")
    unknown = set(described) - {"low", "high", "log", "step"}
    require(not unknown, f"{given}: {', '.join(sorted(unknown))} is not known; accepted is {FORMS}")
    whole = all(isinstance(described[name], int) for name in ("low", "high"))
    try:
        return (IntDistribution if whole else FloatDistribution)(**described)
    except (TypeError, ValueError) as error:
        raise InputError(f"{given}: {error}") from None


def suggest(trial: Trial, key: str, distribution: BaseDistribution) -> None:
    """Let the sampler draw option ``key`` of ``trial``, unless it has a value already."""
    if isinstance(distribution, CategoricalDistribution):
        trial.suggest_categorical(key, distribution.choices)
    elif isinstance(distribution, IntDistribution):
        trial.suggest_int(key, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
    elif isinstance(distribution, FloatDistribution):
        trial.suggest_float(key, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def words(values: Mapping[str, Any]) -> list[str]:
    """Return ``values`` as words of a command line, from which Hydra reads exactly these values."""
    return [f"{key}={_text(value)}" for key, value in values.items()]


def short(values: Mapping[str, Any]) -> str:
    """Return ``values`` as words for reading, with three digits of each number."""
    return " ".join(words({key: float(f"{v:.3g}") if isinstance(v, float) else v for key, v in values.items()}))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_text(child)}' for name, child in value.items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value if isinstance(value, str) else repr(value)  # the shortest text that reads as the same number


def derived_seed(seed: int, *names: object) -> int:
    """Return a seed of 32 bits, a pure function of ``seed`` and ``names``."""
    digest = hashlib.sha256(" ".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:4], "big")
