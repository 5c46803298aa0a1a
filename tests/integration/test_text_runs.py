"""Runs on texts: precision, schedules, reports, accumulation, messages, and two processes like one."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import open_dict
from pytorch_lightning import Callback

from mtl.checkpoints.files import read
from mtl.checks import InputError
from mtl.cli import train
from mtl.config import resolvers
from mtl.pipeline.run import run
from tests.glue_files import TINY, write_glue
from tests.integration.helpers import SMALL, compose_small
from tests.integration.test_processes import TWO, result, weights
from tests.programs import SERVER, attempt, free_port, ranks

TASKS = ("rte", "sst2", "stsb")
LAYERS = (0, 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_glue(folder / "glue", dict.fromkeys(TASKS, 18))
    return folder


class Watch(Callback):
    """Keep what passes: the routings of each step, and the module."""

    routings: list[dict[str, list[Any]]] = []  # noqa: RUF012
    module: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        Watch.routings.append(outputs["routings"])
        Watch.module = pl_module


def watched(folder: Path, data: Path, *words: str) -> Any:
    """Run on texts with a ``Watch``; return the trained module."""
    more = [
        "data.tasks=[rte,sst2,stsb]",
        f"paths.data_dir={data}",
        "data.task_order=round_robin",
        "trainer.max_epochs=1",
    ]
    cfg = compose_small(folder, *TINY, *more, "logger=csv", *words)
    Watch.routings = []
    with open_dict(cfg):
        cfg.callbacks.watch = {"_target_": f"{__name__}.Watch"}
    run(cfg)
    return Watch.module


def gates(module: Any) -> list[Any]:
    return [module.network.layers[layer].mixture.gate.gates[f"task_{name}"] for layer in LAYERS for name in TASKS]


def test_bfloat16_and_a_schedule_of_all_temperatures(data: Path, tmp_path: Path) -> None:
    words = ["gate=softmax_selector", "schedule=temperature", "callbacks.temperature_schedule.epochs=0.5"]
    module = watched(tmp_path, data, *words, "trainer.precision=bf16-mixed")
    assert [float(gate.temperature) for gate in gates(module)] == pytest.approx([0.01] * 6)
    found = [routing for routings in Watch.routings for batches in routings.values() for routing in batches]
    assert len(found) == len(LAYERS) * 6  # two batches of each task
    assert {routing.weights.dtype for routing in found} == {torch.float32}
    rows = list(csv.DictReader((tmp_path / "csv" / "metrics.csv").read_text().splitlines()))
    losses = [float(row["train/step_loss"]) for row in rows if row["train/step_loss"]]
    assert len(losses) == 6
    assert all(0 < loss < 100 for loss in losses)


def test_schedule_of_all_entropy_weights_and_report_of_each_layer(data: Path, tmp_path: Path) -> None:
    words = ["gate=comet", "schedule=entropy_weight", "callbacks.entropy_schedule.epochs=0.5"]
    module = watched(tmp_path, data, *words, "recipe.comet.entropy_weight=0.25", "callbacks.routing.figures=true")
    assert [float(gate.entropy_weight) for gate in gates(module)] == [0.25] * 6
    folder = tmp_path / "routing"
    for layer in LAYERS:
        assert (folder / f"expert_share_layer_{layer}.png").stat().st_size > 5000
        assert (folder / f"weights_over_training_layer_{layer}.png").stat().st_size > 5000
        shares = list(csv.DictReader((folder / f"expert_share_layer_{layer}.csv").read_text().splitlines()))
        assert [row.pop("task") for row in shares] == list(TASKS)
        assert all(sum(map(float, row.values())) == pytest.approx(1) for row in shares)
        course = list(csv.DictReader((folder / f"weights_over_training_layer_{layer}.csv").read_text().splitlines()))
        assert [int(row.pop("step")) for row in course] == list(range(1, 7))
        assert sorted(row.pop("task") for row in course) == sorted(TASKS * 2)
        assert all(sum(map(float, row.values())) == pytest.approx(1, abs=1e-6) for row in course)


def test_accumulated_batches_of_other_lengths_equal_the_large_batch(tmp_path: Path) -> None:
    """Sixteen rows in an epoch: two batches of 8, sorted by length and padded to two lengths, or one of 16."""
    write_glue(tmp_path / "glue", {"rte": 16})
    words = [*TINY, "data.tasks=[rte]", "data.published_split=true", f"paths.data_dir={tmp_path}", "recipe.dropout=0"]
    words += ["trainer.precision=64-true", "recipe.comet.entropy_weight=0", "~logger", "optimizer=sgd"]
    run(compose_small(tmp_path / "one", *words, "data.batch_size=16"))
    run(compose_small(tmp_path / "two", *words, "data.batch_size=8", "trainer.accumulate_grad_batches=2"))
    one, two = (read(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("one", "two"))
    assert one["global_step"] == two["global_step"] == 2
    for name, value in one["state_dict"].items():
        if not isinstance(value, torch.Tensor):  # the vocabulary's digest
            assert two["state_dict"][name] == value
            continue
        torch.testing.assert_close(two["state_dict"][name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data=glue", "network=mmoe", "bottom=embedding"],
            r"input 'tokens' is Tokens: this network takes .*; texts need network=transf",
        ),
        (["data=movielens", "network=transformer"], r"network=transformer reads tokens; this data has "),
        (
            [*TINY, "gate=hash", "network.route=sentence"],
            r"network.route=sentence: HashGate routes each token by its id",
        ),
    ],
    ids=["no tokens wanted", "no tokens given", "no ids of sentences"],
)
def test_parts_that_do_not_fit(words: list[str], message: str, data: Path, tiny_data: Path, tmp_path: Path) -> None:
    folder = tiny_data if "data=movielens" in words else data
    tasks = [] if "data=movielens" in words else ["data.tasks=[rte]", "data.download=false"]
    with pytest.raises(InputError, match=message):
        run(compose_small(tmp_path, *words, *tasks, f"paths.data_dir={folder}"))


def test_without_the_extra_one_message_names_it(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"^network=transformer needs .* transformers: pip install -e '\.\[text\]'$"):
        run(compose_small(tmp_path, *TINY, "data.tasks=[rte]", f"paths.data_dir={data}"))


class ShowModules(Callback):
    """Print which libraries for texts are imported at the end of a run."""

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        print("imported:", [name for name in ("transformers", "tokenizers") if name in sys.modules])


def test_tabular_run_leaves_transformers_alone(tmp_path: Path) -> None:
    outcome = attempt([f"+callbacks.show={{_target_: {__name__}.ShowModules}}"], tmp_path)
    assert outcome.status == 0, outcome.output
    assert "imported: []" in outcome.output


THREE = [
    *TINY,
    "data.tasks=[rte,sst2,stsb]",
    "trainer.max_epochs=1",
    "trainer.precision=64-true",
    "logger=csv",
    "recipe.dropout=0",
]
RUNS = {
    "comet": ["gate=comet", "recipe.comet.entropy_weight=1.0", "recipe.k=2"],
    "top1": [
        *("gate=task_top1", "gate.balance_weight=0.5", "network.route=sentence"),
        *("data.tasks_per_step=2", "data.task_order=shuffled"),
    ],
}


def logged(folder: Path) -> dict[tuple[str, int], float]:
    """Return the losses of each step, and the means of the auxiliary losses of each epoch."""
    rows = list(csv.DictReader((folder / "csv" / "metrics.csv").read_text().splitlines()))
    names = [name for name in rows[0] if name == "train/step_loss" or name.startswith("train/aux/")]
    return {(name, int(row["step"])): float(row[name]) for row in rows for name in names if row.get(name)}


def run_as(rank: int, ports: list[int], folder: Path, words: dict[str, list[str]]) -> None:
    """Be one of two processes, as torchrun starts them, in all runs, one after the other."""
    resolvers.RANK = str(rank)
    for port, (name, options) in zip(ports, words.items(), strict=True):
        os.environ |= ranks(rank, 2, port)
        own = [*TWO, *SMALL, *options, "data.batch_size=4", f"hydra.run.dir={folder / name}"]
        sys.argv = ["train.py", *own]
        train.main()


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do all runs with one process in ``one``, and with two in ``two``."""
    folder = tmp_path_factory.mktemp("texts")
    write_glue(folder / "data" / "glue", {"rte": 30, "sst2": 40, "stsb": 30})
    here = [*THREE, f"paths.data_dir={folder / 'data'}"]
    run(compose_small(folder / "teacher", *here, "network.mixture_layers=[]", "trainer.max_epochs=1"))
    words = {name: [*here, *options] for name, options in RUNS.items()}
    words["comet"] += ["distillation=dense_run", f"distillation.teacher={folder}/teacher/checkpoints/last.ckpt"]
    ports = [free_port() for _ in words]
    both = [SERVER.Process(target=run_as, args=(rank, ports, folder / "two", words)) for rank in range(2)]
    for process in both:
        process.start()
    for name, options in words.items():
        run(compose_small(folder / "one" / name, *options))
    for process in both:
        process.join(240)
        assert process.exitcode == 0
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_equal_one(name: str, one_and_two: Path) -> None:
    one, two = one_and_two / "one" / name, one_and_two / "two" / name
    expected = logged(one)
    assert {key for key, _ in expected} >= {
        "train/step_loss",
        "train/aux/balance" if name == "top1" else "train/aux/entropy",
    }
    assert logged(two) == pytest.approx(expected, abs=1e-8)
    theirs = weights(two)
    for key, value in weights(one).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(theirs[key], value, rtol=0, atol=1e-6)
    assert result(two) == pytest.approx(result(one), abs=1e-8)
