"""Measure time and memory of a mixture layer with 4 to 1024 experts, two per sample, executed dense and sparse.

python benchmarks/experts_scaling.py [--rounds N]. Batches of 512, 256 inputs and outputs, one task, a top-2 gate, and
dropout in training. "Separate" is a list of modules, which are all called and mixed. Above 256 experts, it and the
dense execution are left out. Memory is the peak of the tensors allocated in a training step, without the parameters,
according to torch's profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common import medians, options, take_turns, write

# isort: split
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from mtl.experts.dense import StackedDense
from mtl.experts.dispatch import Dispatch
from mtl.gates import TopKGate

ROWS, WIDTH, ALL_UP_TO = 512, 256, 256


class Layer(nn.Module):
    """A top-2 gate and stacked experts."""

    def __init__(self, num_experts: int, execution: str) -> None:
        super().__init__()
        self.gate = TopKGate(1, num_experts, WIDTH, k=2)
        self.experts, self.dispatch = StackedDense(num_experts, WIDTH, [WIDTH], 0.5), Dispatch(execution)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.dispatch(self.experts, x, self.gate(x))
        return mixed


class Separate(nn.Module):
    """A top-2 gate and a list of experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate = TopKGate(1, num_experts, WIDTH, k=2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.5)) for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], 1)  # [B, E, H]
        return (self.gate(x).weights.transpose(1, 2) * outputs).sum(1)


def predict(layer: nn.Module, x: Tensor) -> None:
    layer.eval()
    with torch.no_grad():
        layer(x)


def train(layer: nn.Module, x: Tensor) -> None:
    layer.train()
    layer(x).sum().backward()
    layer.zero_grad()


def memory(step: Callable[[], object]) -> float:
    """Return the peak of what a step allocates, in MiB."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    held = highest = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest / 2**20


def main() -> None:
    given = options(__doc__, rounds=5)
    rows, x = [], torch.randn(ROWS, WIDTH)
    for number in (4, 16, 64, 256, 1024):
        layers: dict[str, nn.Module] = {"sparse": Layer(number, "sparse")}
        if number <= ALL_UP_TO:
            layers |= {"dense": Layer(number, "dense"), "separate": Separate(number)}
        predicting = medians(take_turns({n: partial(predict, layer, x) for n, layer in layers.items()}, given.rounds))
        training = medians(take_turns({n: partial(train, layer, x) for n, layer in layers.items()}, given.rounds, 4))
        row: dict[str, object] = {"experts": number}
        for title, values in (("predict", predicting), ("train", training)):
            row |= {f"{title} {way}, ms": values.get(way) for way in ("separate", "dense", "sparse")}
            for way in ("separate", "dense"):
                row[f"{title} sparse of {way}"] = values["sparse"] / values[way] if way in values else None
        row |= {f"memory {way}, MiB": memory(partial(train, layer, x)) for way, layer in layers.items()}
        rows.append(row)
    first = rows[0]["predict sparse, ms"]
    for row in rows:
        row["predict sparse of 4 experts"] = row["predict sparse, ms"] / first
    write(given, "experts_scaling", "Mixture layers of many experts", rows)


if __name__ == "__main__":
    main()
