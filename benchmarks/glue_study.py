"""Compare dense, routed and single-task Transformers on the parts of GLUE that two cores can train.

``python benchmarks/glue_study.py run --encoder FOLDER --data DATA --workers 2`` trains what is not yet in ``--out``,
two runs at a time, and resumes runs that were stopped; ``table`` prints the tables of ``benchmarks/accuracy.md`` from
the finished runs. The encoder is that of ``benchmarks/pretrain_encoder.py``. ``DATA`` holds ``glue/``,
``senteval/CR/`` (train.tsv.gz, dev.tsv.gz: label, text) and ``sentiment-domains/kitchen/`` (the same names; a header
with sentence and label).

Parts: multi-task training (b), stage 2 on one task (c), gates of known tasks for unseen ones (d), a dense model split
into experts and distilled (e), orders of the tasks (f).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl

from mtl.report.statistics import summarise, welch

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2)
TASKS = "rte,mrpc,stsb,cola,sst2"
MAIN = {"rte": "accuracy", "mrpc": "accuracy", "stsb": "spearman", "cola": "matthews", "sst2": "accuracy"}
STEPS = {"rte": 70, "mrpc": 103, "stsb": 162, "cola": 240, "sst2": 500}  # one epoch of each, in batches of 32
ROWS = "data.max_rows={sst2:16000}"
NETWORKS = {
    "dense": "experiment=glue_mt_dense",
    "switch": "experiment=glue_mt_switch",
    "tag": "experiment=glue_mt_tag",
    "comet": "experiment=glue_mt_tag gate=comet recipe.comet.gamma=0.1 recipe.comet.entropy_weight=0.5",
}
SPLITS = {  # of a dense model into four experts of a quarter of its width
    "hash": "experiment=moebert_hash",
    "balanced": "experiment=moebert_hash gate.assignment=balanced",
    "top1": "experiment=comet_bert gate=task_top1 gate.keep_scale=true",
    "comet": "experiment=comet_bert",
    "sentence": "experiment=comet_bert network.route=sentence",
    "plus": "experiment=comet_bert_plus",
    "random": "experiment=comet_bert network.start=random network.importance=null",
}
STAGE_1 = "data.tasks_per_step=1 recipe.learning_rate=3e-4"
STAGE_2 = "experiment=glue_finetune recipe.learning_rate=1e-4 recipe.max_epochs=5 recipe.patience=5"
UNSEEN = (
    "data=text gate=task_top1 recipe.task_top1.bias=false recipe.task_top1.initial_std=0.001 "
    "recipe.learning_rate=1e-4 recipe.batch_size=16 recipe.max_epochs=10 recipe.patience=10 lr_schedule=linear "
    "callbacks.lr_schedule.warmup=0.1 trainer.gradient_clip_val=1.0 monitor=val/average"
)
DISTILLED = (
    "experts.width=256 network.shared_neurons=170 distillation.weight=2.0 recipe.batch_size=32 "
    "recipe.learning_rate=1e-4 recipe.max_epochs=2 recipe.patience=2"
)


def runs(out: Path, data: Path) -> Iterator[tuple[str, str]]:
    """Yield name and options of each run, but encoder, data and seed; a run comes after the one that it starts from."""
    steps = sum(STEPS.values())
    for seed in SEEDS:
        for name, words in NETWORKS.items():
            yield f"b_{name}_s{seed}", f"{words} data.tasks=[{TASKS}] {ROWS} {STAGE_1} trainer.max_steps={steps}"
        for task, own in STEPS.items():
            rows = ROWS if task == "sst2" else ""
            yield (
                f"b_single_{task}_s{seed}",
                f"{NETWORKS['dense']} data.tasks=[{task}] {rows} {STAGE_1} trainer.max_steps={own}",
            )
    for seed in SEEDS:
        yield f"c_ctag_s{seed}", f"experiment=cglue_mt_tag data.tasks=[rte,mrpc,stsb] {STAGE_1} trainer.max_steps=335"
        for task in ("rte", "mrpc"):
            for name, start in {"tag": "b_tag", "ctag": "c_ctag"}.items():
                words = f"{STAGE_2} data.tasks=[{task}] start_from={out}/{start}_s{seed}/checkpoints/last.ckpt"
                yield f"c_{task}_{name}_s{seed}", words
    for seed in SEEDS:
        for name in ("cr", "kitchen"):
            for gate in ("sst2", "rte", "random"):
                files = ",".join(f"{key}:{data}/adapt/{name}_{part}.parquet" for key, part in FILES.items())
                task = f"{files},text:text,label:label,kind:binary,metrics:[accuracy],gate_from:{gate}"
                start = f"start_from={out}/b_tag_s{seed}/checkpoints/last.ckpt"
                yield f"d_{name}_{gate}_s{seed}", f"{UNSEEN} data.tasks.new={{{task}}} {start}"
    teacher = f"{out}/e_teacher/checkpoints/best.ckpt"
    dense = "experiment=glue_finetune network.mixture_layers=[] recipe.learning_rate=1e-4 recipe.max_epochs=4"
    yield "e_teacher", f"{dense} data.tasks=[sst2] {ROWS}"
    for seed in SEEDS:
        for name, words in SPLITS.items():
            importance = "" if name == "random" else f"network.importance={out}/e_teacher/importance.pt"
            start = f"start_from={teacher} distillation.teacher={teacher} {importance}"
            yield f"e_{name}_s{seed}", f"{words} data.tasks=[sst2] {ROWS} {DISTILLED} {start}"
    for seed in SEEDS:
        for order in ("uniform", "shuffled"):
            words = f"{NETWORKS['tag']} data.tasks=[{TASKS}] {ROWS} {STAGE_1} trainer.max_steps={steps}"
            yield f"f_{order}_s{seed}", f"{words} data.order={order}"


FILES = {"path": "train", "val_path": "val", "test_path": "test"}


def write_unseen(data: Path) -> None:
    """Write the unseen tasks: a tenth of the rows to train, a tenth to validate, the development rows to test."""
    (data / "adapt").mkdir(exist_ok=True)
    for name, folder in {"cr": "senteval/CR", "kitchen": "sentiment-domains/kitchen"}.items():
        train, test = (labelled_texts(next((data / folder).glob(f"{part}*"))) for part in ("train", "dev"))
        train, tenth = train.sample(fraction=1.0, shuffle=True, seed=0), len(train) // 10
        parts = {"train": train[:tenth], "val": train[tenth : 2 * tenth], "test": test}
        for part, rows in parts.items():
            rows.write_parquet(data / "adapt" / f"{name}_{part}.parquet")


def labelled_texts(path: Path) -> pl.DataFrame:
    """Return the columns ``text`` and ``label`` of a gzipped file, with or without a header."""
    with gzip.open(path, "rt", newline="") as file:
        if "sentence" in file.readline().split("\t"):
            file.seek(0)
            rows = [(row["label"], " ".join(row["sentence"].split())) for row in csv.DictReader(file, delimiter="\t")]
        else:
            file.seek(0)
            rows = [tuple(line.rstrip("\n").split("\t", 1)) for line in file]
    return pl.DataFrame({"text": [text for _, text in rows], "label": [label for label, _ in rows]})


def train(out: Path, data: Path, encoder: Path, workers: int) -> None:
    """Train the runs that have no results yet, ``workers`` at a time; those that fail are reported at the end."""
    if not (data / "adapt").is_dir():
        write_unseen(data)
    common = f"paths.data_dir={data} network.pretrained={encoder} logger=csv"

    def train_one(run: tuple[str, str]) -> bool:
        name, words = run
        seed = name[-1] if name[-2:-1] == "s" else "0"
        split = "" if name.startswith("d_") else "data.published_split=false"
        saved = out / name / "checkpoints" / "last.ckpt"  # of a run that was stopped
        if saved.is_file():
            options = f"ckpt={saved} paths.data_dir={data}"
        else:
            shutil.rmtree(out / name, ignore_errors=True)
            options = f"{words} {common} {split} seed={seed} hydra.run.dir={out}/{name}"
        command = [sys.executable, "train.py", *options.split()]
        done = subprocess.run(command, cwd=ROOT).returncode == 0
        if done and name == "e_teacher":
            checkpoint = f"{out}/{name}/checkpoints/best.ckpt"
            command = [sys.executable, "-m", "mtl.use.importance", checkpoint, "--data-dir", str(data)]
            done = subprocess.run(command, cwd=ROOT).returncode == 0
        return done

    todo = [(name, words) for name, words in runs(out, data) if not (out / name / "results.json").is_file()]
    first = [run for run in todo if str(out) not in run[1]]  # the others start from runs in ``out``
    failed = []
    for stage in (first, [run for run in todo if run not in first]):
        with ThreadPoolExecutor(workers) as pool:
            failed += [run[0] for run, done in zip(stage, pool.map(train_one, stage), strict=True) if not done]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def values(out: Path, name: str, metric: str) -> list[float]:
    """Return ``metric`` of the finished runs ``name_s0``, ``name_s1``, ... in percent; undefined counts as 0."""
    files = (out / f"{name}_s{seed}" / "results.json" for seed in SEEDS)
    found = [json.loads(file.read_text())["test"][metric] for file in files if file.is_file()]
    return [100 * (value or 0.0) for value in found]


def cell(found: Sequence[float], others: Sequence[float] = ()) -> str:
    """Return mean ± standard error, the number of runs if there are fewer than seeds, and Welch's p against others."""
    own = summarise(found)
    if own.mean is None:
        return "-"
    text = f"{own.mean:.1f}" + ("" if own.error is None else f" ± {own.error:.1f}")
    text += f" ({len(found)})" if len(found) < len(SEEDS) else ""
    p = welch(found, others)
    return text if p is None else f"{text}, p={p:.2f}"


def table(out: Path, rows: Mapping[str, Sequence[tuple[str, str]]], header: Sequence[str]) -> None:
    """Print Markdown: for each row the runs and the metric of its columns, compared with those of the first row."""
    print("\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    first = [values(out, *column) for column in next(iter(rows.values()))]
    for number, (title, columns) in enumerate(rows.items()):
        cells = [
            cell(values(out, *column), others if number else ()) for column, others in zip(columns, first, strict=True)
        ]
        print(f"| {title} | " + " | ".join(cells) + " |")


def tables(out: Path) -> None:
    """Print all tables."""
    mains = [f"{task}/{metric}" for task, metric in MAIN.items()]
    multi = {name: [(f"b_{name}", metric) for metric in [*mains, "average"]] for name in NETWORKS}
    single = [(f"b_single_{task}", f"{task}/{metric}") for task, metric in MAIN.items()]
    header = ["network", *(f"{task} {metric}" for task, metric in MAIN.items())]
    table(out, multi, [*header, "average"])
    table(out, {"dense": multi["dense"][:-1], "single task": single}, header)
    stage_2 = {name: [(f"c_{task}_{name}", f"{task}/accuracy") for task in ("rte", "mrpc")] for name in ("tag", "ctag")}
    table(out, stage_2, ["stage 1", "rte accuracy", "mrpc accuracy"])
    unseen = {
        gate: [(f"d_{name}_{gate}", "new/accuracy") for name in ("cr", "kitchen")] for gate in ("random", "sst2", "rte")
    }
    table(out, unseen, ["gate of", "cr accuracy", "kitchen accuracy"])
    table(out, {name: [(f"e_{name}", "sst2/accuracy")] for name in SPLITS}, ["split", "sst2 accuracy"])
    teacher = out / "e_teacher" / "results.json"
    if teacher.is_file():
        print(f"\nTheir teacher: {100 * json.loads(teacher.read_text())['test']['sst2/accuracy']:.1f}")
    orders = {"natural": "b_tag", "uniform": "f_uniform", "shuffled": "f_shuffled"}
    columns = {order: [(name, metric) for metric in [*mains, "average"]] for order, name in orders.items()}
    table(out, columns, ["order", *header[1:], "average"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--encoder", type=Path, help="folder of the pretrained encoder")
    parser.add_argument("--data", type=Path, default=ROOT / "data")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time; with several, set OMP_NUM_THREADS=1")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "study")
    given = parser.parse_args()
    if given.action == "table":
        tables(given.out)
    elif given.encoder is None:
        parser.error("run needs --encoder")
    else:
        train(given.out.resolve(), given.data.resolve(), given.encoder.resolve(), given.workers)


if __name__ == "__main__":
    main()
