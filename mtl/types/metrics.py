"""The kinds of tasks, and the metrics that a task of each kind may name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mtl.checks import LARGEST_WHOLE, require, suggestion
from mtl.objectives import OF_QUANTILES

TaskKind = Literal["binary", "multiclass", "regression", "span"]
KINDS: tuple[TaskKind, ...] = ("binary", "multiclass", "regression", "span")
RANKING = ("ndcg@K", "hit_rate@K", "mrr", "gauc")  # of binary tasks, rank the rows of each group; K as in ndcg@10
TOP = ("precision@K%", "recall@K%", "lift@K%")  # of binary tasks, look at the K per cent with the highest predictions
SHOWN_FIRST = ("auprc", "recall@10%", "lift@10%")  # of tasks with few positives
OF_FEW_POSITIVES = ("auroc", *SHOWN_FIRST, "logloss", "accuracy")  # the default metrics of these tasks in a table
OF_PROBABILITIES = ("ece", "logloss", "normalized_entropy", "calibration_ratio", "base_rate")
METRICS: dict[TaskKind, tuple[str, ...]] = {  # metrics that a task may name; mtl.training.metrics computes them
    "binary": ("auroc", "auprc", "accuracy", "f1", "matthews", *OF_PROBABILITIES, *TOP, *RANKING),
    "multiclass": ("accuracy", "macro_f1", "matthews", "auroc", "ece", "logloss"),
    "regression": ("mse", "mae", "rmse", "r2", "pearson", "spearman"),
    "span": ("f1", "exact_match"),
}


def metric_family(name: str) -> str:
    """Return the entry of ``METRICS`` that a metric belongs to: ``ndcg@K`` for ``ndcg@10``, else its own name."""
    base, at, k = name.partition("@")
    number, percent = k.removesuffix("%"), "%" * k.endswith("%")
    fits = number.isdecimal() and 0 < int(number) <= (100 if percent else LARGEST_WHOLE)
    return f"{base}@{f'K{percent}' if fits else f'({k})'}" if at else name


def check_metrics(location: str, kind: TaskKind, names: Sequence[str], quantiles: Sequence[float] = ()) -> None:
    """Raise InputError, which begins with ``location``, unless tasks of ``kind`` have all metrics ``names``.

    ``quantiles``: see ``Objective``.
    """
    families = (*METRICS[kind], *OF_QUANTILES) if quantiles else METRICS[kind]
    unknown = [name for name in names if metric_family(name) not in families]
    accepted, hint = f"a {kind} task has {', '.join(families)}", suggestion(unknown[0], families) if unknown else ""
    require(not unknown, f"{location}: metrics=[{', '.join(names)}]: {accepted}; not {', '.join(unknown)}{hint}")
