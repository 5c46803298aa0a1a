"""Which way of sharing helps on real tables: ``python benchmarks/sharing_methods.py [--jobs 2]``.

Networks and weightings of tasks are trained on samples of 15 tables of ``benchmarks/tables``, with the same number of
trials for all. A trial has a learning rate, a dropout and, of ``tuned weights``, weights of the tasks of its own; the
best by the validation rows counts, and its score of the test rows is reported. Every run is a row of
``accuracy/sharing_methods.csv``; runs that are there already are not computed again, and the page
``accuracy/sharing_methods.md`` is written from the file. Needs ``pip install -e '.[bench,weighting]'``.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from common import ROOT
from omegaconf import OmegaConf
from real_tables import TABLES, classes_of, interval, numbers, read, score
from scipy.stats import rankdata, wilcoxon

import mtl
from mtl.report.statistics import holm

OUT = ROOT / "benchmarks" / "accuracy" / "sharing_methods.csv"
ROWS = 1500  # of a table: 60 % for training, 20 % each for validation and test
EPOCHS, PATIENCE, BATCH, TRIALS = 30, 5, 256, 2
HELD_OUT = 5  # tables, the first by name, beside those on which defaults were chosen
COLUMNS = ("table", "split", "contender", "trial", "valid", "test", "cpu_seconds")
SIZES = {"recipe.expert_units": [128], "recipe.head_units": [64], "recipe.embedding_dim": 16}
AT = {"weighting.grad_wrt": "representation"}
# One network for each setting: its choices, and its options
NETWORKS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "shared bottom": ({"network": "shared_bottom"}, {}),
    "single tasks": ({"network": "single_task"}, {}),
    "MMoE, softmax": ({"gate": "softmax"}, {}),
    "MMoE, top-k": ({"gate": "topk"}, {}),
    "MMoE, DSelect-k": ({"gate": "dselect_k"}, {}),
    "MMoE, COMET": ({"gate": "comet"}, {}),
    "MMoE, ReMoE": ({"gate": "remoe"}, {}),
    "CGC": ({"network": "cgc", "gate": "softmax"}, {"network.num_task_experts": 1}),
    "PLE": ({"network": "ple", "gate": "softmax"}, {"network.num_task_experts": 1}),
    "AdaTT": ({"network": "adatt", "gate": "softmax"}, {}),
    "STEM": ({"network": "stem", "gate": "softmax"}, {}),
}
TUNED = "tuned weights"
WEIGHTINGS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    name: ({"network": "shared_bottom", "weighting": file}, options)
    for name, file, options in (
        (TUNED, "fixed", {}),
        ("uncertainty", "uncertainty", {}),
        ("UW-SO", "uw_so", {}),
        ("FAMO", "famo", {}),
        ("DWA", "dwa", {}),
        ("STCH", "stch", {}),
        ("IMTL-L", "imtl_l", {}),
        ("GradNorm", "gradnorm", {}),
        ("UPGrad", "upgrad", AT),
        ("PCGrad", "pcgrad", AT),
        ("CAGrad", "cagrad", AT),
        ("MGDA", "mgda", AT),
        ("Aligned-MTL", "aligned_mtl", AT),
    )
}
CONTENDERS = NETWORKS | WEIGHTINGS
BETTER, WORSE, UNDECIDED = "Better than a shared bottom", "Worse than a shared bottom", "Undecided"
COLORS = {BETTER: "tab:blue", WORSE: "tab:red", UNDECIDED: "0.45"}
REFERENCE = "shared bottom"  # with the plain sum of the losses, each in standard units


def settings(contender: str, trial: int, tasks: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tasks and the options of a trial; trial 0 has the defaults, the others are drawn, alike for all."""
    draw = np.random.default_rng(trial)
    rate, dropout = math.exp(draw.uniform(math.log(3e-4), math.log(1e-2))), float(draw.choice([0.0, 0.2, 0.5]))
    weights = np.exp(draw.uniform(-math.log(4), math.log(4), len(tasks)))
    options = {"optimizer.lr": rate, "recipe.dropout": dropout} if trial else {}
    weighted = trial and contender == TUNED
    pairs = zip(tasks.items(), weights.tolist() if weighted else [1.0] * len(tasks), strict=True)
    return {name: {"kind": kind, "weight": weight} for (name, kind), weight in pairs}, options


def run(table: str, split: int, contender: str, trial: int) -> dict[str, Any]:
    """Train one network; return a row of the file."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    kinds, frames = read(table, split, ROWS)
    tasks, drawn = settings(contender, trial, kinds)
    choices, changes = CONTENDERS[contender]
    options = {"threads": 1, "blend": "none", "callbacks.early_stopping.patience": PATIENCE} | SIZES | changes | drawn
    options |= {"data.batch_size": BATCH}
    began = time.process_time()
    model = mtl.fit(
        *(frames["train"], tasks),
        **{"valid": frames["valid"], "test": frames["test"], "seed": split, "progress": False},
        **{"max_epochs": EPOCHS, "options": options, **choices},
    )
    seconds = time.process_time() - began
    scores = {part: mean_score(model, kinds, frames, part) for part in ("valid", "test")}
    return dict(zip(COLUMNS, (table, split, contender, trial, *scores.values(), seconds), strict=True))


def mean_score(model: Any, kinds: Mapping[str, str], frames: Mapping[str, pl.DataFrame], part: str) -> float:
    """Return the mean over the tasks of R2, AUROC or accuracy; a task that has one class in these rows is left out."""
    predicted, scores = model.predict(frames[part].drop(kinds)), []
    for task, kind in kinds.items():
        labels = frames[part][task]
        there = labels.is_not_null().to_numpy()
        classes = [] if kind == "regression" else classes_of(frames["train"][task])
        truth = numbers(labels, classes)[there]
        if len(set(truth.tolist())) < 2:
            continue
        if kind == "regression":
            outputs = predicted[f"{task}_prediction"].to_numpy()
        elif kind == "binary":
            positive = predicted[f"{task}_probability"].to_numpy()
            outputs = np.column_stack([1 - positive, positive])
        else:
            outputs = predicted.select(f"{task}_probability_{name}" for name in classes).to_numpy()
        scores.append(score(kind, truth, outputs[there])[1])
    return float(np.mean(scores))


def chosen(runs: pl.DataFrame) -> pl.DataFrame:
    """Return the mean test score by table and contender, of the best trial of each split by the validation rows."""
    best = runs.sort("valid", descending=True, nulls_last=True).unique(["table", "split", "contender"], keep="first")
    return best.group_by("table", "contender").agg(pl.col("test").mean().round(9))  # equal means are ties, in any order


def summary(scores: pl.DataFrame, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what is known of each contender against the reference, over the tables that have all of ``names``.

    ``ranks`` and ``gains`` by table; ``p``, and the number of tables ``needed``, not for the reference.
    """
    wide = scores.pivot("contender", index="table", values="test").select("table", *names).drop_nulls().sort("table")
    values = wide.select(names).to_numpy()
    ranks = rankdata(-values, axis=1)
    differences = values - values[:, [list(names).index(REFERENCE)]]
    rows = [
        {"name": name, "ranks": ranks[:, column], "gains": differences[:, column], "p": None, "needed": None}
        for column, name in enumerate(names)
    ]
    others = [row for row in rows if row["name"] != REFERENCE]
    tested = holm([float(wilcoxon(row["gains"]).pvalue) if row["gains"].any() else 1.0 for row in others])
    for row, p in zip(others, tested, strict=True):
        row["p"], mean, spread = p, float(row["gains"].mean()), float(row["gains"].std(ddof=1))
        row["needed"] = math.ceil(((1.96 + 0.84) * spread / mean) ** 2) if mean else None  # power 0.8, two-sided 5 %
    return rows


def table_of(rows: Sequence[Mapping[str, Any]], seconds: Mapping[str, float]) -> list[str]:
    """Return a Markdown table, best rank first."""
    title = f"rank among {len(rows)}"
    lines = [
        f"| | {title} | against {REFERENCE} | better on | p | tables that would decide | CPU s |",
        "|---" * 7 + "|",
    ]
    for row in sorted(rows, key=lambda row: row["ranks"].mean()):
        gains = row["gains"]
        if row["p"] is None:
            cells = ["", "", "", ""]
        else:
            better = f"{int((gains > 0).sum())} of {len(gains)}"
            cells = [interval(gains, "+.4f"), better, f"{row['p']:.2g}", f"{row['needed']:,}" if row["needed"] else ""]
        lines.append(f"| {row['name']} | {interval(row['ranks'])} | {' | '.join(cells)} | {seconds[row['name']]:.1f} |")
    return lines


def picture(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw the mean difference of each contender from the reference, with its interval, into ``OUT``'s ``.png``."""
    mpl.use("agg")
    import matplotlib.pyplot as plt

    height = sum(len(rows) for rows in parts.values())
    figure, axes = plt.subplots(
        len(parts), 1, figsize=(7, 1.2 + 0.27 * height), sharex=True, height_ratios=[len(r) for r in parts.values()]
    )
    for axis, (title, rows) in zip(axes, parts.items(), strict=True):
        shown = sorted((row for row in rows if row["p"] is not None), key=lambda row: row["gains"].mean())
        for place, row in enumerate(shown):
            low, high = bounds(row["gains"])
            color = COLORS[verdict(row)]
            axis.plot([low, high], [place, place], color=color)
            axis.plot(row["gains"].mean(), place, "o", color=color)
        axis.set_yticks(range(len(shown)), [row["name"] for row in shown])
        axis.axvline(0, color="0.7", linewidth=0.8, zorder=0)
        axis.set_title(title, loc="left", fontsize=10)
    axes[-1].set_xlabel(f"mean score minus that of a {REFERENCE}, 95 % over tables")
    figure.tight_layout()
    figure.savefig(OUT.with_suffix(".png"), dpi=110)


def bounds(values: Any) -> tuple[float, float]:
    """Return the ends of ``interval``."""
    draws = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return float(low), float(high)


def sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say which contenders differ from the reference by Wilcoxon's test over the tables, after Holm's correction."""
    names_by_verdict: dict[str, list[str]] = {}
    for row in rows:
        if row["p"] is not None:
            names_by_verdict.setdefault(verdict(row), []).append(row["name"])
    return " ".join(f"{word}: {'; '.join(names_by_verdict[word])}." for word in COLORS if word in names_by_verdict)


def verdict(row: Mapping[str, Any]) -> str:
    return UNDECIDED if row["p"] >= 0.05 else BETTER if row["gains"].mean() > 0 else WORSE


def page(runs: pl.DataFrame) -> str:
    count = pl.struct("table", "contender").n_unique()
    runs = runs.filter(count.over("split", "trial") == count)  # a trial of a split that all have
    scores, seconds = chosen(runs), dict(runs.group_by("contender").agg(pl.col("cpu_seconds").mean()).iter_rows())
    families = {"Networks, losses added": NETWORKS, "Weightings of a shared bottom": {REFERENCE: None, **WEIGHTINGS}}
    there = {*scores["contender"]}
    parts = {title: summary(scores, [n for n in names if n in there]) for title, names in families.items()}
    picture(parts)
    trials = runs.group_by("split").agg(pl.col("trial").n_unique())["trial"]
    range_of_trials = f"{trials.min()} to {trials.max()}" if trials.n_unique() > 1 else f"{trials.max()}"
    count = min(len(rows[0]["gains"]) for rows in parts.values())
    lines = ["# What to share, and how to weight it: methods at equal budgets on real tables", ""]
    lines += [f"{count} tables, {len(trials)} splits of each, {range_of_trials} trials of each method and split.", ""]
    lines += [f"![Differences from a {REFERENCE}]({OUT.stem}.png)", ""]
    for title, rows in parts.items():
        lines += [
            f"## {title}",
            "",
            sentence(rows),
            "",
            *table_of(rows, seconds),
            "",
        ]
    return "\n".join([*lines, EXPLANATION])


EXPLANATION = f"""Scores are means over the targets of R2 (regression), AUROC (binary) or accuracy (multiclass) on
the test rows, and over the splits. Ten of the tables are those on which defaults were chosen, the others the first
{HELD_OUT} of the rest, by name. Of a table with more than {ROWS:,} rows, {ROWS:,} are drawn; 60 % train, 20 %
choose the epoch and the trial, 20 % test. All networks have the options of `recipe=table` but smaller layers (128
units in experts, 64 in heads, embeddings of 16), batches of {BATCH} and up to {EPOCHS} epochs, with patience
{PATIENCE}. The first trial has the default learning rate and dropout; of the others both are drawn, alike for all
methods, and of `{TUNED}` the weights of the tasks too, from 1/4 to 4. Methods that compare gradients do so at the
representation, GradNorm at the parameters. Intervals are of 10,000 bootstrap samples of the tables, p of Wilcoxon's
test over the tables, after Holm's correction over the methods of a part. "Tables that would decide": so many would
show the observed mean difference, with its spread over tables, in four of five studies. CPU seconds are of one run;
they grow with the other load of the machine. All runs are from before columns of two numbers were categories. By
`python benchmarks/sharing_methods.py`; all runs: [{OUT.name}]({OUT.name}).
"""


def main() -> None:
    held_out = {file.stem: bool(OmegaConf.load(file).held_out) for file in TABLES.glob("*.yaml")}
    names = sorted(held_out.keys() - {"ames"}, key=lambda name: (held_out[name], name))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    usual = names[: HELD_OUT + sum(not held_out[name] for name in names)]
    parser.add_argument("--tables", nargs="+", default=usual, choices=names)
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--contenders", nargs="+", default=[*CONTENDERS], choices=[*CONTENDERS])
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = pl.read_csv(OUT).to_dicts() if OUT.exists() else []
    done = {tuple(row[name] for name in COLUMNS[:4]) for row in rows}
    wanted = [
        (table, split, contender, trial)
        for trial in range(args.trials)
        for split in args.splits
        for table in args.tables
        for contender in args.contenders
    ]
    spawned = get_context("spawn")  # a fork would inherit the locks of polars' threads
    with ProcessPoolExecutor(args.jobs, spawned) as pool, OUT.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not rows:
            writer.writeheader()
        try:
            for future in as_completed([pool.submit(run, *job) for job in wanted if job not in done]):
                writer.writerow(future.result())
                file.flush()
        except BaseException:  # or the pool would compute the rest first
            pool.shutdown(cancel_futures=True)
            raise
    runs = pl.read_csv(OUT).sort(COLUMNS[:4])
    runs.write_csv(OUT)
    OUT.with_suffix(".md").write_text(page(runs))


if __name__ == "__main__":
    main()
