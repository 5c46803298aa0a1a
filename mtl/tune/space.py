"""The space of a study: a distribution for each option, and values as overrides of the command line of mtl train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from mtl.checks import InputError, format_value
from mtl.overrides import write_value

FORMS = "a list of values, or {low: ..., high: ...} with log: true or step: ..."


def distributions(space: Mapping[str, Any]) -> dict[str, BaseDistribution]:
    """Return the distribution of each option of ``space``, in the same order; raise InputError if one is wrong."""
    return {key: _distribution(key, described) for key, described in space.items()}


def _distribution(key: str, described: Any) -> BaseDistribution:
    try:
        if isinstance(described, list):
            choices = [write_value(v, str) if isinstance(v, list | dict) else v for v in described]
            return CategoricalDistribution(choices)
        whole = isinstance(described["low"], int) and isinstance(described["high"], int)
        return (IntDistribution if whole else FloatDistribution)(**described)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"space: {key}={format_value(described)}: must be {FORMS} ({error})") from None


def suggest(trial: Trial, key: str, distribution: BaseDistribution) -> None:
    """Let the sampler draw option ``key`` of ``trial``, unless it has a value already."""
    if isinstance(distribution, CategoricalDistribution):
        trial.suggest_categorical(key, distribution.choices)
    elif isinstance(distribution, IntDistribution):
        trial.suggest_int(key, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
    elif isinstance(distribution, FloatDistribution):
        trial.suggest_float(key, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def write_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return ``values`` as overrides of a command line, from which Hydra reads exactly these values."""
    return [f"{key}={write_value(value, str)}" for key, value in values.items()]


def short(values: Mapping[str, Any]) -> str:
    """Return ``values`` as overrides for reading, with three digits of each number."""
    rounded = {key: float(f"{v:.3g}") if isinstance(v, float) else v for key, v in values.items()}
    return " ".join(write_overrides(rounded))
