"""Time a training step of the MovieLens network, as ratios to one with torch's own dropout in the same process.

Run it by hand: python benchmarks/training_step.py [rounds]. The contenders take turns, so that a disturbance of the
machine falls on all of them; the median is printed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mtl  # noqa: F401  (first: it makes torchvision importable)

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.experts import dense
from mtl.functional import relu_dropout
from mtl.gates import CometGate, DSelectKGate, SoftmaxGate, TopKGate
from mtl.module import MultiTaskModule
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.types import Batch, Categorical, DataSpec, TaskSpec

USERS, ITEMS, ROWS = 6040, 3952, 512
SPEC = DataSpec(
    {"user": Categorical(USERS), "item": Categorical(ITEMS)},
    [TaskSpec("watch", "binary", weight=0.9), TaskSpec("rating", "regression", weight=0.1)],
)
Dropout = Callable[[Tensor, float, bool], Tensor]


def torch_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    return F.dropout(F.relu(x), p, training)


def stepper(gate: Callable[..., torch.nn.Module], dropout: Dropout) -> Callable[[], None]:
    """Return a function that does one training step on a random batch."""
    network = MMoE(
        SPEC,
        num_experts=16,
        bottom=partial(TabularBottom, embedding_dim=128),
        experts=partial(dense.StackedDense, units=[256], dropout=0.5),
        gate=gate,
        heads=partial(Heads, units=[256], dropout=0.5),
    )
    module = MultiTaskModule(network, SPEC.tasks, partial(torch.optim.Adam, lr=1e-4, fused=True))
    module.log = lambda *args, **kwargs: None  # there is no trainer to log to
    optimizer = module.configure_optimizers()

    def step() -> None:
        dense.relu_dropout = dropout
        user, item = torch.randint(USERS, (ROWS,)), torch.randint(ITEMS, (ROWS,))
        targets = {"watch": torch.randint(2, (ROWS,)).float(), "rating": torch.rand(ROWS)}
        loss = module.training_step(Batch({"user": user, "item": item}, targets), 0)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main(rounds: int) -> None:
    contenders = {
        "softmax, torch dropout": stepper(SoftmaxGate, torch_dropout),
        "softmax": stepper(SoftmaxGate, relu_dropout),
        "topk": stepper(TopKGate, relu_dropout),
        "dselect_k": stepper(partial(DSelectKGate, entropy_weight=0.01), relu_dropout),
        "comet": stepper(partial(CometGate, entropy_weight=0.01), relu_dropout),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, step in contenders.items():
            for repetition in range(6):
                start = time.perf_counter()
                step()
                if number and repetition:  # the first of a block and of all warm up
                    seconds[name].append(time.perf_counter() - start)
    baseline = statistics.median(seconds["softmax, torch dropout"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:24} {1000 * median:7.2f} ms   {median / baseline:5.2f} of torch dropout")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
