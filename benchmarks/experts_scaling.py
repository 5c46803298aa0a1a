"""Time and memory of a mixture layer with 4 to 1024 experts, two per sample and task, all of them or those in use.

python benchmarks/experts_scaling.py [--rounds N]. Batches of 512, 256 inputs and outputs, 2 tasks, top-2 gates. The
dense form is left out above 256 experts. Memory: the largest sum of living tensors in a training step beyond the
parameters, from torch's profiler.
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

ROWS, WIDTH, DENSE_UP_TO = 512, 256, 256


class Layer(nn.Module):
    """A top-2 gate for each of two tasks, and the experts."""

    def __init__(self, num_experts: int, execution: str) -> None:
        super().__init__()
        self.gate = TopKGate(2, num_experts, WIDTH, k=2)
        self.experts, self.dispatch = StackedDense(num_experts, WIDTH, [WIDTH], 0.5), Dispatch(execution)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.dispatch(self.experts, x, self.gate(x))
        return mixed


def predict(layer: Layer) -> None:
    layer.eval()
    with torch.no_grad():
        layer(torch.randn(ROWS, WIDTH))


def train(layer: Layer) -> None:
    layer.train()
    layer(torch.randn(ROWS, WIDTH)).sum().backward()
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
    rows = []
    for number in (4, 16, 64, 256, 1024):
        ways = ["dense", "sparse"] if number <= DENSE_UP_TO else ["sparse"]
        layers = {way: Layer(number, way) for way in ways}
        predicting = medians(take_turns({way: partial(predict, layer) for way, layer in layers.items()}, given.rounds))
        training = medians(take_turns({way: partial(train, layer) for way, layer in layers.items()}, given.rounds, 4))
        row: dict[str, object] = {"experts": number}
        for title, values in (("predict", predicting), ("train", training)):
            row |= {f"{title} {way}, ms": values.get(way) for way in ("dense", "sparse")}
            row[f"{title} sparse of dense"] = values["sparse"] / values["dense"] if "dense" in values else None
        for way, layer in layers.items():
            row[f"memory {way}, MiB"] = memory(partial(train, layer))
        rows.append(row)
    first = rows[0]["predict sparse, ms"]
    for row in rows:
        row["predict sparse of 4 experts"] = row["predict sparse, ms"] / first
    write(given, "experts_scaling", "Mixture layers of many experts", rows)


if __name__ == "__main__":
    main()
