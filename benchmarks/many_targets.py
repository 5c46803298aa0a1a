"""Does sharing pay with hundreds of targets, and which kind? ``python benchmarks/many_targets.py --data tox21``.

Molecules (Tox21, ToxCast, ChEMBL) as 2,048 bits, with 12 to 514 targets whose labels are mostly missing. Each contender
is trained on each split; what it predicts of the validation and test rows is kept in ``--keep``, so that nothing is
computed twice. The scores go to ``accuracy/many_targets.csv``, and the page ``accuracy/many_targets.md`` is written
from the file. Needs ``pip install -e '.[bench,chem]'`` and the files of ``data=molecules`` below ``--data-dir``.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import scipy.sparse
from common import ROOT
from rdkit import Chem, RDLogger
from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator
from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles
from scipy.stats import binomtest, wilcoxon
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss, roc_auc_score

import mtl
from mtl.report.statistics import holm

OUT = ROOT / "benchmarks" / "accuracy" / "many_targets.csv"
FILES = {
    "tox21": ["tox21.csv.gz"],
    "toxcast": ["toxcast_data.csv.gz"],
    "chembl": [f"chembl_5thresh_ts_{part}.csv.gz" for part in ("train", "valid", "test")],
}
PARTS = ("train", "valid", "test")
BITS, MIN_LABELS = 2048, 5  # labels of a target in each part; of each class in the training rows
SHARES = (0.8, 0.1, 0.1)
C = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # of logistic regressions
ALPHA = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # of ridge regressions
FIELDS = ("data", "split", "seed", "contender", "target", "labels", "valid", "test", "cpu_seconds")


def read(name: str, split: str, seed: int, folder: Path) -> tuple[str, dict[str, pl.DataFrame]]:
    """Return the kind of the targets, and the rows of each part: the list of ``bits`` and the targets with labels.

    ``split``: "random"; "scaffold", where molecules with one scaffold stay together and the rarest scaffolds are
    tested; or "files", the published parts. Molecules that rdkit cannot read are left out.
    """
    frames = [pl.read_csv(folder / file, infer_schema_length=None) for file in FILES[name]]
    kind = "regression" if name == "chembl" else "binary"
    targets = [column for column in frames[0].columns if column not in ("smiles", "mol_id")]
    frames = [with_bits(frame.select("smiles", pl.col(targets).cast(pl.Float64))) for frame in frames]
    if split == "files":
        parts = dict(zip(PARTS, frames, strict=True))
    else:
        [frame] = frames
        order = np.random.default_rng(seed).permutation(len(frame))
        if split == "scaffold":
            scaffolds = [MurckoScaffoldSmiles(mol=Chem.MolFromSmiles(smiles)) for smiles in frame["smiles"]]
            sizes = {scaffold: scaffolds.count(scaffold) for scaffold in set(scaffolds)}
            order = np.array(sorted(order, key=lambda row: (-sizes[scaffolds[row]], scaffolds[row])))
        ends = np.cumsum([0, *(round(share * len(frame)) for share in SHARES[:2]), len(frame)])
        parts = {
            part: frame[order[start:end]] for part, (start, end) in zip(PARTS, itertools.pairwise(ends), strict=True)
        }
    kept = [target for target in targets if has_labels(kind, [rows[target] for rows in parts.values()])]
    return kind, {part: rows.select("bits", *kept) for part, rows in parts.items()}


def with_bits(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the molecules that can be read, with their Morgan fingerprints of radius 2."""
    generator = GetMorganGenerator(radius=2, fpSize=BITS)
    molecules = [Chem.MolFromSmiles(smiles) for smiles in frame["smiles"]]
    bits = [[] if mol is None else list(map(str, generator.GetFingerprint(mol).GetOnBits())) for mol in molecules]
    readable = [mol is not None for mol in molecules]
    return frame.with_columns(pl.Series("bits", bits, pl.List(pl.String))).filter(pl.Series(readable))


def has_labels(kind: str, columns: Sequence[pl.Series]) -> bool:
    """Return whether a target can be learnt and tested: both classes, or labels, in each part and enough to train."""
    if kind == "regression":
        return all(column.count() >= MIN_LABELS for column in columns)
    counts = [[int((column == label).sum()) for label in (0, 1)] for column in columns]
    return min(counts[0]) >= MIN_LABELS and all(min(pair) > 0 for pair in counts[1:])


def score(kind: str, truth: Any, prediction: Any, mean: float) -> float:
    """Return the AUROC, or 1 - MSE / the MSE of the ``mean`` training label."""
    if kind == "binary":
        return float(roc_auc_score(truth, prediction))
    return float(1 - np.mean((truth - prediction) ** 2) / np.mean((truth - mean) ** 2))


def rival(name: str, kind: str, frames: Mapping[str, pl.DataFrame], seed: int) -> dict[str, Any]:
    """Train a model for each target; return its predictions ``[N, T]`` of the rows for validation and test."""
    x = {part: bit_matrix(rows) for part, rows in frames.items()}
    fit: Callable[..., Any] = {"linear": linear, "forest": forest, "lightgbm": lightgbm}[name]
    predictions: dict[str, list[Any]] = {"valid": [], "test": []}
    for target in frames["train"].columns[1:]:
        y = {part: rows[target].to_numpy() for part, rows in frames.items()}
        labelled = {part: ~np.isnan(values) for part, values in y.items()}
        rows = {part: x[part][labelled[part]] for part in ("train", "valid")}
        predict = fit(kind, rows, {part: y[part][labelled[part]] for part in rows}, seed)
        for part, columns in predictions.items():
            columns.append(predict(x[part]))
    return {part: np.column_stack(columns) for part, columns in predictions.items()}


def bit_matrix(rows: pl.DataFrame) -> Any:
    lists = rows["bits"].list.eval(pl.element().cast(pl.Int64))
    indices, ends = lists.explode().drop_nulls().to_numpy(), np.cumsum([0, *lists.list.len()])
    return scipy.sparse.csr_matrix((np.ones(len(indices), np.float32), indices, ends), (len(rows), BITS))


def linear(kind: str, x: Any, y: Any, seed: int) -> Any:
    """Return the ridge or logistic regression whose penalty is best on the validation rows."""
    fitted = []
    for penalty in ALPHA if kind == "regression" else C:
        if kind == "regression":
            predict = Ridge(alpha=penalty).fit(x["train"], y["train"]).predict
            loss = float(np.mean((predict(x["valid"]) - y["valid"]) ** 2))
        else:
            model = LogisticRegression(C=penalty, max_iter=300).fit(x["train"], y["train"])
            predict = lambda rows, model=model: model.predict_proba(rows)[:, 1]  # noqa: E731
            loss = log_loss(y["valid"], predict(x["valid"]), labels=[0, 1])
        fitted.append((loss, len(fitted), predict))
    return min(fitted)[2]


def forest(kind: str, x: Any, y: Any, seed: int) -> Any:
    """Return a random forest of 200 trees, which reads a third of the bits at a split, of classes their root."""
    make: Any = RandomForestRegressor if kind == "regression" else RandomForestClassifier
    options = {"max_features": 1 / 3, "min_samples_leaf": 2} if kind == "regression" else {"max_features": "sqrt"}
    model = make(n_estimators=200, n_jobs=1, random_state=seed, **options).fit(x["train"], y["train"])
    return model.predict if kind == "regression" else lambda rows: model.predict_proba(rows)[:, 1]


def lightgbm(kind: str, x: Any, y: Any, seed: int) -> Any:
    """Return boosted trees with small steps, which validation rows stop."""
    import lightgbm

    make: Any = lightgbm.LGBMRegressor if kind == "regression" else lightgbm.LGBMClassifier
    options = {"learning_rate": 0.03, "num_leaves": 15, "min_child_samples": 10, "colsample_bytree": 0.1}
    options |= {"subsample": 0.8, "subsample_freq": 1, "reg_lambda": 3.0}
    model = make(n_estimators=2000, n_jobs=1, verbose=-1, random_state=seed, **options)
    stop = lightgbm.early_stopping(100, verbose=False)
    model.fit(x["train"], y["train"], eval_set=[(x["valid"], y["valid"])], callbacks=[stop])
    return model.predict if kind == "regression" else lambda rows: model.predict_proba(rows)[:, 1]


def network(kind: str, frames: Mapping[str, pl.DataFrame], seed: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Train one network for all targets, perhaps with its blend; return predictions as ``rival``, by model in use."""
    metrics = ["r2"] if kind == "regression" else ["auroc"]
    names = {target: target.replace(".", "_") for target in frames["train"].columns[1:]}
    tasks = {name: {"kind": kind, "column": target, "metrics": metrics} for target, name in names.items()}
    options = {"threads": 1, "recipe": "fingerprints", "blend": "none", "monitor": "val/average"} | overrides
    rows = {"valid": frames["valid"], "test": frames["test"], "report": False}
    with tempfile.TemporaryDirectory() as folder:
        mtl.fit(frames["train"], tasks, seed=seed, progress=False, folder=f"{folder}/run", options=options, **rows)
        model = mtl.load(f"{folder}/run")
        return {part: predictions_of(model, frames[part], kind, [*tasks]) for part in ("valid", "test")}


def predictions_of(model: Any, rows: pl.DataFrame, kind: str, targets: Sequence[str]) -> Any:
    """Return the predictions ``[N, T]``, of classes the probability of the second one."""
    ending = "prediction" if kind == "regression" else "probability"
    return model.predict(rows.select("bits")).select(f"{target}_{ending}" for target in targets).to_numpy()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it has started."""
    return sum(os.times()[:4])


def predict(contender: str, trial: str, kind: str, frames: Any, seed: int, kept: Path) -> Any:
    """Return the predictions of a contender and its CPU seconds from ``kept``, which this writes if need be."""
    if not kept.exists():
        began = cpu_seconds()
        if contender in RIVALS:
            predictions = rival(contender, kind, frames, seed)
        else:
            predictions = network(
                kind, frames, seed, NETWORKS[contender] | ({LEARNING_RATE: float(trial)} if trial else {})
            )
        np.savez_compressed(kept, cpu_seconds=cpu_seconds() - began, **predictions)
    return np.load(kept)


def scores_of(kind: str, frames: Mapping[str, pl.DataFrame], predictions: Any) -> list[dict[str, Any]]:
    """Return the scores of each target; ``labels``: of the training rows, of classes those of the rarer one."""
    rows = []
    for column, target in enumerate(frames["train"].columns[1:]):
        train = frames["train"][target].drop_nulls().to_numpy()
        labels = len(train) if kind == "regression" else int(min(train.sum(), len(train) - train.sum()))
        row: dict[str, Any] = {"target": target, "labels": labels}
        for part in ("valid", "test"):
            truth = frames[part][target].to_numpy()
            labelled = ~np.isnan(truth)
            row[part] = score(kind, truth[labelled], predictions[part][labelled, column], train.mean())
        rows.append(row)
    return rows


def page(table: pl.DataFrame) -> str:
    """Return the page of the results: a part for each data set and split, of the seeds that all contenders have."""
    lines = ["# Hundreds of targets: does sharing pay?", ""]
    for (data, split), part in table.group_by("data", "split", maintain_order=True):
        complete = pl.col("contender").n_unique().over("seed") == part["contender"].n_unique()
        part = part.filter(complete)
        if BASE not in part["contender"]:
            continue
        means = part.group_by("contender", "target", maintain_order=True).agg(
            pl.col("labels", "valid", "test").mean(), pl.col("cpu_seconds").mean(), pl.col("seed").n_unique()
        )
        lines += [f"## {TITLES[data]}, {split} split", "", *compared(means, data), ""]
        lines += [*ahead_of_rivals(part), ""] if {*RIVALS} <= {*part["contender"]} else []
    return "\n".join([*lines, "## How it was measured", "", EXPLANATION])


def compared(means: pl.DataFrame, data: str) -> list[str]:
    """Return a table: the scores of each contender by labels, and its difference from ``BASE`` over the targets."""
    wide = means.pivot("contender", index=["target", "labels"], values="test").drop_nulls()
    labels = wide["labels"].to_numpy()
    groups = {
        "all": labels >= 0,
        "< 50": labels < 50,
        "50-200": (labels >= 50) & (labels <= 200),
        "> 200": labels > 200,
    }
    groups = {name: inside for name, inside in groups.items() if inside.any()}
    gains = {name: (wide[name] - wide[BASE]).to_numpy() for name in wide.columns[2:] if name != BASE}
    p_values = dict(zip(gains, holm([float(wilcoxon(gain).pvalue) for gain in gains.values()]), strict=True))
    mean = np.median if data == "chembl" else np.mean
    heads = [f"{name} ({int(inside.sum())})" for name, inside in groups.items()]
    lines = [f"| | {' | '.join(heads)} | against {BASE} [95 %] | better on | p | splits | CPU s |"]
    lines += ["|---" * (len(heads) + 6) + "|"]
    for name in wide.columns[2:]:
        rows = means.filter(pl.col("contender") == name)
        cells = [f"{mean(wide[name].to_numpy()[inside]):.3f}" for inside in groups.values()]
        if name == BASE:
            cells += ["", "", ""]
        else:
            better = f"{np.mean(gains[name] > 0):.0%}"
            cells += [interval(gains[name]), better, f"{p_values[name]:.2g}"]
        cells += [str(rows["seed"][0]), f"{rows['cpu_seconds'].mean():,.0f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def ahead_of_rivals(part: pl.DataFrame) -> list[str]:
    """Return how often ours are ahead of the rival that is best on the validation rows of a target."""
    rivals = part.filter(pl.col("contender").is_in(RIVALS))
    best = rivals.sort("valid", descending=True, maintain_order=True).unique(["seed", "target"], maintain_order=True)
    lines = []
    for name in (BASE, BLEND):
        ours = part.filter(pl.col("contender") == name)
        both = (
            ours.join(best, on=["seed", "target"])
            .group_by("target")
            .agg(gain=(pl.col("test") - pl.col("test_right")).mean())
        )
        gain = both["gain"].to_numpy()
        if len(gain):
            wins, ties = int((gain > 0).sum()), int((gain == 0).sum())
            p = float(binomtest(wins, len(gain) - ties).pvalue) if ties < len(gain) else 1.0
            lines.append(
                f"* {name} is ahead of the best of {', '.join(RIVALS)} by the validation rows of a target on {wins} of "
                f"{len(gain)} targets (sign test, p = {p:.2g}), by {interval(gain)}."
            )
    return lines


def interval(values: Any) -> str:
    """Return the mean of the values of some targets, with a 95 % bootstrap interval over the targets."""
    draws = np.random.default_rng(0).integers(0, len(values), (2_000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return f"{values.mean():+.4f} [{low:+.4f}, {high:+.4f}]"


RIVALS = ("linear", "forest", "lightgbm")
BASE, BLEND = "shared bottom", "blend"
LEARNING_RATE = "recipe.learning_rate"
TRIALS = ("0.001", "0.0005")  # learning rates; the first split's validation rows choose, of few targets
MIXTURE = {"network": "mmoe", "recipe.num_experts": 4, "recipe.k": 2}
STATIC = MIXTURE | {"network.static_gate": True}
GATES = ("softmax", "topk", "dselect_k", "comet")
NETWORKS: dict[str, dict[str, Any]] = {
    BASE: {},
    "shared bottom, 4 times as wide": {"recipe.expert_units": [1024]},
    **{f"mixture, {gate}": MIXTURE | {"gate": gate} for gate in GATES},
    **{f"mixture, static {gate}": STATIC | {"gate": gate} for gate in GATES},
    "loss over labels": {"loss_reduction": "labels"},
    "uncertainty": {"weighting": "uncertainty"},
    "famo": {"weighting": "famo"},
    "aligned_mtl": {"weighting": "aligned_mtl"},
    "cgc": {"network": "cgc", "gate": "softmax", "recipe.num_experts": 4},
    "stem": {"network": "stem", "gate": "softmax"},
    "single tasks": {"network": "single_task"},
    BLEND: {"blend": "auto"},
}
MANY = 100  # targets, with one trial a network and without the contenders
FEW = ("aligned_mtl", "cgc", "stem", "single tasks")  # too dear for hundreds of targets
TITLES = {"tox21": "Tox21", "toxcast": "ToxCast", "chembl": "ChEMBL"}
EXPLANATION = """Scores: AUROC (Tox21, ToxCast), or 1 - MSE / MSE of the mean training label (ChEMBL: the median over
the targets, since those with few test labels have no lower bound), on test rows; means over targets and splits. Columns
of numbers group the targets by their training labels, of classes by those of the rarer class. Each molecule is the list
of the 2,048 bits of its Morgan fingerprint (radius 2). Random splits are 80 / 10 / 10 by the seed of the first column,
which is also that of the contenders; scaffold splits test the rarest scaffolds; ChEMBL has the published files, by
year. A target counts if each part has both classes, and training at least five of each; of ChEMBL, five labels in
each part. The differences from the shared bottom are paired by target and are means over the splits, with 95 %
bootstrap intervals over the targets; p is Wilcoxon's signed rank test with Holm's correction for the contenders of a
table. Targets of the same molecules are not independent, so intervals and p-values are somewhat too small.

Networks are `recipe=fingerprints` (a layer of 1,024 units on the list, then 256 units; dropout .5) with the epoch of
the best mean metric on the validation rows; mixtures have four experts of 256 units, k=2; "static" gates do not see
the molecule, so they say which targets share. Both dropouts were chosen on the validation rows of the first three
Tox21 splits and of the first ToxCast split, the options of the blend's trees on those of another Tox21 split. With
few targets each network has two learning rates, .001 and .0005, of which the validation rows of the first split
choose; with hundreds it has the first. The rivals are one model for each target: logistic or ridge regression whose
penalty the validation rows choose, a random forest of 200 trees, LightGBM that they stop. On ChEMBL, whose validation
rows are of earlier years than its test rows, ridge regressions that all have the penalty 30 would have .133, but the
validation rows prefer smaller ones; one penalty for all targets, chosen by them, has .097. One thread each; CPU
seconds grow with the other load of the machine, so compare them roughly. By `python benchmarks/many_targets.py`; all
numbers: [many_targets.csv](many_targets.csv).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", nargs="+", default=[*FILES], choices=FILES)
    parser.add_argument("--split", choices=("random", "scaffold"), default="random")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--contenders", nargs="+", default=[*RIVALS, *NETWORKS], choices=[*RIVALS, *NETWORKS])
    parser.add_argument("--data-dir", type=Path, default=ROOT / "data" / "molecules")
    parser.add_argument("--keep", type=Path, default=ROOT / "outputs" / "many_targets")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    RDLogger.DisableLog("rdApp.*")  # type: ignore[attr-defined]  # rdkit has no types for it
    args.keep.mkdir(parents=True, exist_ok=True)
    table = pl.read_csv(OUT) if OUT.exists() else pl.DataFrame(schema=dict.fromkeys(FIELDS, pl.String))
    chosen: dict[tuple[str, str], str] = {}
    for name, seed in itertools.product(args.data, args.seeds):
        split = "files" if name == "chembl" else args.split
        kind, frames = read(name, split, seed, args.data_dir)
        for contender in args.contenders:
            many, tried = len(frames["train"].columns) > MANY, []
            if many and contender in FEW:
                continue
            trials = ("",) if contender in (*RIVALS, BLEND) else TRIALS[:1] if many else TRIALS
            for trial in [chosen[name, contender]] if (name, contender) in chosen else trials:
                file_name = "-".join([name, split, str(seed), contender.replace(" ", "_"), *([trial] if trial else [])])
                file = predict(contender, trial, kind, frames, seed, args.keep / f"{file_name}.npz")
                rows = scores_of(kind, frames, file)
                tried.append((np.mean([row["valid"] for row in rows]), trial, rows, float(file["cpu_seconds"])))
            _, chosen[name, contender], rows, seconds = max(tried, key=lambda results: results[0])
            keys = {"data": name, "split": split, "seed": seed, "contender": contender, "cpu_seconds": seconds}
            new = pl.DataFrame([{**keys, **row} for row in rows]).select(FIELDS)
            table = table.join(new, on=FIELDS[:5], how="anti") if len(table) else table.clear()
            table = pl.concat([table.cast(dict(new.schema)), new])
            table.write_csv(OUT)
            mean, few = (new.filter(pl.col("labels") < most)["test"].mean() for most in (10**9, 30))
            print(f"{file_name}: {mean:.4f} (< 30 labels {few or math.nan:.4f}), {seconds:.1f} CPU s", flush=True)
    OUT.with_suffix(".md").write_text(page(table))


if __name__ == "__main__":
    main()
