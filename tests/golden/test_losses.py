"""Training gives the numbers it gave before: the losses of a few float64 steps of every network, gate and execution.

``losses.json`` holds the lists, and ``runs.json`` the results of whole runs in float64. After a change that is meant to
change numbers, write them anew with ``python -m tests.golden.test_losses`` and say in the commit why they changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mtl.config import build
from mtl.files.run_files import RESULTS
from mtl.pipeline.run import run
from mtl.training.measurements import Measurements
from mtl.types import Batch
from tests.golden.pinned import keep_equal
from tests.integration.helpers import compose_small
from tests.tiny_data import write_tiny_data

STEPS = 12
SAME: dict[str, Any] = {"rel": 1e-9, "nan_ok": True}
FILE, RUNS_FILE = (Path(__file__).parent / name for name in ("losses.json", "runs.json"))
MOVIELENS = "data=movielens recipe.embedding_dim=8 recipe.expert_units=[12,8] recipe.head_units=[8] data.batch_size=64"
SYNTHETIC = "data=synthetic_moe data.num_groups=1 data.tasks_per_group=16 recipe.num_experts=4"
TABLE = (
    "data=table data.path=${paths.data_dir}/visits.csv data.batch_size=32 gate=softmax recipe.num_experts=3 "
    "recipe.embedding_dim=4 recipe.expert_units=[8] recipe.head_units=[8]"
)
TASKS = "data.tasks={click:{kind:binary},plan:{kind:multiclass},minutes:{kind:regression}}"
CHAIN = "data.tasks={click:{kind:binary},cart:{kind:binary,after:click},rare:{kind:binary,loss:focal}}"
FEW_LABELS = "data.tasks={click:{kind:binary},rare:{kind:binary,pos_weight:balanced},minutes:{kind:regression}}"
LOSSES = (
    "data.tasks={a:{column:minutes,kind:regression,loss:huber},b:{column:minutes,kind:regression,loss:quantile},"
    "c:{column:minutes,kind:regression,loss:poisson},d:{column:minutes,kind:regression,transform:log},"
    "e:{column:minutes,kind:regression,loss:mae},f:{column:plan,kind:multiclass,smoothing:0.1}}"
)
TEXTS = "data.vocabulary=200 data.batch_size=8 recipe.num_experts=3 network.config={hidden_size:16,num_hidden_layers:2}"
GATES = ("softmax", "topk", "hash", "dselect_k", "comet", "softmax_selector", "gumbel_softmax", "task_top1", "fixed")
GATES += ("cosine", "remoe")
CASES = [
    *(f"gate={gate} {MOVIELENS}" for gate in GATES),
    *(f"gate={gate} network.execution=sparse {MOVIELENS}" for gate in ("topk", "comet", "dselect_k")),
    f"gate=topk gate.noisy=true gate.load_weight=0.1 gate.importance_weight=0.1 gate.z_weight=0.1 {MOVIELENS}",
    f"gate=dselect_k recipe.num_experts=6 {MOVIELENS}",
    f"gate=comet recipe.num_experts=5 gate.k=3 {MOVIELENS}",
    f"gate=topk permutation=sinkhorn {MOVIELENS}",
    f"gate=comet permutation=sinkhorn permutation.per_task=true {MOVIELENS}",
    f"network=shared_bottom {MOVIELENS}",
    f"network=single_task {MOVIELENS}",
    f"network=cgc gate=softmax {MOVIELENS}",
    f"network=ple gate=comet network.num_task_experts=6 {MOVIELENS}",
    f"network=adatt gate=comet {MOVIELENS}",
    f"network=stem gate=softmax {MOVIELENS}",
    f"gate=comet gate.gamma=1 gate.entropy_weight=3 {SYNTHETIC}",
    f"gate=dselect_k {SYNTHETIC} permutation=sinkhorn",
    "network=frozen_experts data=synthetic_recovery gate=dselect_k",
    "network=frozen_experts data=synthetic_recovery gate=comet permutation=sinkhorn",
    "network=routed_dense data=synthetic_pairs gate=gumbel_matrix",
    "network=routed_headless data=synthetic_pairs gate=dselect_k",
    "network=routed_mnists data=four_mnists gate=gumbel_matrix data.tasks_per_step=2",
    "network=routed_omniglot data=omniglot gate=gumbel_matrix data.side=14 data.batch_size=2",
    "data=multi_mnist gate=topk network.execution=sparse data.batch_size=16",
    "data=multi_mnist gate=comet network.execution=dense network/gate_trunk=conv data.batch_size=16",
    "data=digits gate=softmax data.batch_size=8 recipe.num_experts=4",
    f"network=grouped network.groups=[[watch],[rating]] {MOVIELENS}",
    f"heads=per_task gate=comet {MOVIELENS}",
    f"gate=comet gate.shared=true {MOVIELENS}",
    f"gate=comet recipe.static_gate=true {MOVIELENS}",
    f"gate=comet embedding_optimizer=rowwise_adagrad {MOVIELENS}",
    f"network=ple gate=comet network.num_task_experts=6 heads=per_task {MOVIELENS}",
    f"network=ple gate=softmax weighting=pcgrad {MOVIELENS}",
    f"gate=comet weighting=upgrad weighting.grad_wrt=representation {MOVIELENS}",
    f"network=shared_bottom weighting=upgrad weighting.grad_wrt=representation {MOVIELENS}",
    f"network=adatt gate=softmax weighting=cagrad {MOVIELENS}",
    *(f"gate=softmax weighting={weighting} {MOVIELENS}" for weighting in ("uncertainty", "gradnorm", "dwa", "mgda")),
    f"network=transformer data=glue gate=task_top1 {TEXTS}",
    f"network=transformer data=glue gate=topk network.mixture_layers=[1] {TEXTS}",
    f"{TABLE} {TASKS}",
    f"{TABLE} {TASKS} ensemble=3 recipe.number_dim=2 data.weight_column=weight",
    f"{TABLE} {CHAIN} heads=aitm",
    f"{TABLE} {CHAIN} network=cgc",
    f"{TABLE} {FEW_LABELS} data.normalize_losses=true weighting=upgrad",
    f"{TABLE} {LOSSES}",
]
RUNS = [  # through Lightning: hooks, callbacks, evaluation
    f"gate=dselect_k permutation=sinkhorn {MOVIELENS}",
    f"gate=softmax_selector schedule=temperature trainer.max_epochs=3 {MOVIELENS}",
    f"gate=topk weighting=famo gate.bias_rate=0.01 {MOVIELENS}",
    f"network=ple gate=remoe weighting=gradnorm callbacks.conflict.every_n_steps=2 {MOVIELENS}",
    f"{TABLE} {TASKS} data.weight_column=weight data.group_column=user calibrate=true blend=none",
    f"{TABLE} {CHAIN} ensemble=2 callbacks.ema.decay=0.9 blend=none",
    f"{TABLE} {LOSSES} blend=none",
    f"network=transformer data=glue gate=task_top1 {TEXTS}",
]


def train(words: str, folder: Path, data_dir: Path, steps: int = STEPS) -> list[float]:
    """Return the training losses, task losses and auxiliary ones, of the first ``steps`` steps in float64."""
    cfg = compose_small(folder, *words.split(), f"paths.data_dir={data_dir}")
    torch.manual_seed(0)
    data = build.build_data(cfg)
    data.prepare_data()
    data.setup()
    module = build.build_module(cfg, build.build_network(cfg, data.spec), data.spec).double().train()
    module.log = lambda *args, **kwargs: None
    optimizer = module.configure_optimizers()
    losses: list[float] = []
    while len(losses) < steps:
        for batch in data.train_dataloader():
            loss = module.training_step(double(batch), 0)["loss"]
            optimizer.zero_grad()
            loss.backward()
            module.weighting.before_step(len(losses))
            optimizer.step()
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                break
    return losses


def double(batch: Batch | list[Batch]) -> Batch | list[Batch]:
    if isinstance(batch, list):
        return [double(part) for part in batch]
    inputs, targets, weights = (
        {name: value.double() if value.is_floating_point() else value for name, value in part.items()}
        for part in (batch.inputs, batch.targets, batch.weights)
    )
    return Batch(inputs, targets, weights, batch.groups)


def run_numbers(words: str, folder: Path, data_dir: Path) -> dict[str, float]:
    """Return the numbers of results.json of a run of two epochs in float64."""
    more = ("trainer.precision=64-true", "trainer.limit_train_batches=6", f"paths.data_dir={data_dir}")
    run(compose_small(folder, *words.split(), *more))
    measured = Measurements.from_plain(json.loads((folder / RESULTS).read_text())["numbers"])
    values = {str(key): measurement.value for key, measurement in measured.items()}
    errors = {f"{key} error": m.sem for key, m in measured.items() if m.sem is not None}
    return dict(sorted({**values, **errors}.items()))


@pytest.mark.parametrize("words", CASES, ids=str)
def test_losses_are_unchanged(words: str, tmp_path: Path, tiny_data: Path) -> None:
    assert train(words, tmp_path, tiny_data) == pytest.approx(json.loads(FILE.read_text())[words], rel=1e-9)


@pytest.mark.parametrize("words", RUNS, ids=str)
def test_results_are_unchanged(words: str, tmp_path: Path, tiny_data: Path) -> None:
    expected = json.loads(RUNS_FILE.read_text())[words]
    assert run_numbers(words, tmp_path, tiny_data) == pytest.approx(expected, **SAME)


def is_same(new: Any, pinned: Any) -> bool:
    return bool(new == pytest.approx(pinned, **SAME))


def test_pinned_numbers_stay_where_only_the_rounding_differs() -> None:
    pinned = {"same": [0.3], "other": [0.3]}
    kept = keep_equal({"same": [0.1 + 0.2], "other": [0.31], "new": [1.0]}, pinned, is_same)
    assert kept == {"same": [0.3], "other": [0.31], "new": [1.0]}


def main() -> None:
    """Write what is new or has changed into both files."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = write_tiny_data(Path(folder) / "data")
        losses = {words: train(words, Path(folder), data_dir) for words in CASES}
        runs = {words: run_numbers(words, Path(folder, str(number)), data_dir) for number, words in enumerate(RUNS)}
    for file, numbers in ((FILE, losses), (RUNS_FILE, runs)):
        kept = keep_equal(numbers, json.loads(file.read_text()), is_same)
        file.write_text(json.dumps(kept, indent=1) + "\n")
    sys.stdout.write(
        f"{len(losses)} lists of {STEPS} losses in {FILE}, the results of {len(runs)} runs in {RUNS_FILE}\n"
    )


if __name__ == "__main__":
    main()
