"""Time a training step of the MovieLens network, as ratios to one of separate modules in the same process.

Run it by hand: python benchmarks/training_step.py [rounds]. The contenders take turns, so that a disturbance of the
machine falls on all of them; the median is printed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mtl  # noqa: F401  (first: it makes torchvision importable)

# isort: split
import torch
from torch import Tensor, nn

from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, DSelectKGate, SoftmaxGate, TopKGate
from mtl.module import MultiTaskModule
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.types import Batch, Categorical, DataSpec, NetworkOutput, TaskSpec

USERS, ITEMS, ROWS = 6040, 3952, 512
BASELINE = "separate modules"
SPEC = DataSpec(
    {"user": Categorical(USERS), "item": Categorical(ITEMS)},
    [TaskSpec("watch", "binary", weight=0.9), TaskSpec("rating", "regression", weight=0.1)],
)


class SeparateModules(nn.Module):
    """The same network, written as anybody would: a list of experts, torch's dropout, softmax gates."""

    def __init__(self, spec: DataSpec) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 128), nn.Embedding(ITEMS, 128)

        def layer() -> nn.Sequential:
            return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5))

        self.experts = nn.ModuleList(layer() for _ in range(16))
        self.gates = nn.ModuleList(nn.Linear(256, 16) for _ in spec.tasks)
        self.heads = nn.ModuleList(nn.Sequential(layer(), nn.Linear(256, 1)) for _ in spec.tasks)
        self.names = spec.task_names

    def forward(self, inputs: Mapping[str, Tensor], tasks: object = None) -> NetworkOutput:
        x = torch.cat([self.user(inputs["user"]), self.item(inputs["item"])], -1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)  # [B, E, H]
        mixed = [(gate(x).softmax(-1)[..., None] * outputs).sum(1) for gate in self.gates]
        heads = zip(self.names, self.heads, mixed, strict=True)
        return NetworkOutput({name: head(value).squeeze(-1) for name, head, value in heads})


def ours(gate: Callable[..., nn.Module], sparse: bool = False) -> MMoE:
    """Return our network; ``sparse`` makes it run the experts that are needed from the start."""
    return MMoE(
        SPEC,
        num_experts=16,
        bottom=partial(TabularBottom, embedding_dim=128),
        experts=partial(StackedDense, units=[256], dropout=0.5),
        gate=gate,
        heads=partial(Heads, units=[256], dropout=0.5),
        execution="sparse" if sparse else "dense",
    )


def saturated(gate: Callable[..., nn.Module]) -> MMoE:
    """Return our network with a COMET gate as at the end of training: its trees have decided."""
    network = ours(gate, sparse=True)
    with torch.no_grad():
        network.gate.split_weight.mul_(2000.0)
    return network


def stepper(network: nn.Module, fused: bool = True) -> Callable[[], None]:
    """Return a function that does one training step on a random batch."""
    module = MultiTaskModule(network, SPEC.tasks, partial(torch.optim.Adam, lr=1e-4, fused=fused))
    module.log = lambda *args, **kwargs: None  # there is no trainer to log to
    optimizer = module.configure_optimizers()

    def step() -> None:
        user, item = torch.randint(USERS, (ROWS,)), torch.randint(ITEMS, (ROWS,))
        targets = {"watch": torch.randint(2, (ROWS,)).float(), "rating": torch.rand(ROWS)}
        loss = module.training_step(Batch({"user": user, "item": item}, targets), 0)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main(rounds: int) -> None:
    comet = partial(CometGate, entropy_weight=0.01)
    contenders = {
        BASELINE: stepper(SeparateModules(SPEC), fused=False),
        "softmax": stepper(ours(SoftmaxGate)),
        "topk, dense": stepper(ours(TopKGate)),
        "dselect_k, dense": stepper(ours(partial(DSelectKGate, entropy_weight=0.01))),
        "comet, dense": stepper(ours(comet)),
        "topk, sparse": stepper(ours(TopKGate, sparse=True)),
        "comet decided, sparse": stepper(saturated(comet)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, step in contenders.items():
            for repetition in range(6):
                start = time.perf_counter()
                step()
                if number and repetition:  # the first of a block and of all warm up
                    seconds[name].append(time.perf_counter() - start)
    baseline = statistics.median(seconds[BASELINE])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:24} {1000 * median:7.2f} ms   {median / baseline:5.2f} of {BASELINE}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
