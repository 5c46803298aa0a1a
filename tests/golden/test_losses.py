"""Training gives the numbers it gave before: the losses of a few float64 steps of every network, gate and execution.

``losses.json`` holds the lists. After a change that is meant to change numbers, write them anew with
``python -m tests.golden.test_losses`` and say in the commit why they changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from mtl.config import build
from mtl.types import Batch
from tests.integration.helpers import compose_small
from tests.tiny_data import write_tiny_data

STEPS = 12
FILE = Path(__file__).parent / "losses.json"
MOVIELENS = "data=movielens recipe.embedding_dim=8 recipe.expert_units=[12,8] recipe.head_units=[8] data.batch_size=64"
SYNTHETIC = "data=synthetic_moe data.num_groups=1 data.tasks_per_group=16 recipe.num_experts=4"
GATES = ("softmax", "topk", "hash", "dselect_k", "comet", "softmax_selector", "gumbel_softmax", "task_top1", "fixed")
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
    f"network=ple gate=comet network.num_own=6 {MOVIELENS}",
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
            optimizer.step()
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                break
    return losses


def double(batch: Batch | list[Batch]) -> Batch | list[Batch]:
    if isinstance(batch, list):
        return [double(part) for part in batch]
    parts = (batch.inputs, batch.targets)
    return Batch(*({k: v.double() if v.is_floating_point() else v for k, v in part.items()} for part in parts))


@pytest.mark.parametrize("words", CASES)
def test_losses_are_unchanged(words: str, tmp_path: Path, tiny_data: Path) -> None:
    assert train(words, tmp_path, tiny_data) == pytest.approx(json.loads(FILE.read_text())[words], rel=1e-9)


def main() -> None:
    """Write ``losses.json`` anew."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = write_tiny_data(Path(folder) / "data")
        losses = {words: train(words, Path(folder), data_dir) for words in CASES}
    FILE.write_text(json.dumps(losses, indent=1) + "\n")
    sys.stdout.write(f"{len(losses)} lists of {STEPS} losses in {FILE}\n")


if __name__ == "__main__":
    main()
