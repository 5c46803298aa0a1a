"""Time forms of Multi-MNIST's 16 convolutional experts, as ratios to separate modules in the same process.

Run it by hand: python benchmarks/conv_experts.py [rounds]. Batches of 512, forward and backward, two threads. The
contenders take turns, so that a disturbance of the machine falls on all of them; the median is printed.
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
from torch import Tensor, nn

from mtl.experts.conv import StackedConv
from mtl.experts.pairs import Pairs

EXPERTS, ROWS, SIDE = 16, 512, 36
LAYERS = [{"channels": 10, "kernel": 5, "pool": 2}, {"channels": 20, "kernel": 5, "pool": 2}]
FEATURES = 720


def separate() -> nn.ModuleList:
    """Return the experts as ordinary modules."""

    def expert() -> nn.Sequential:
        conv = [nn.Conv2d(1, 10, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(10, 20, 5), nn.ReLU(), nn.MaxPool2d(2)]
        dense = [nn.Linear(FEATURES, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU()]
        return nn.Sequential(*conv, nn.Flatten(), *dense)

    return nn.ModuleList(expert() for _ in range(EXPERTS))


class Grouped(nn.Module):
    """All experts of a layer in one convolution: one of 160 channels, then one of 16 groups."""

    def __init__(self, layout: torch.memory_format) -> None:
        super().__init__()
        self.layout, self.experts = layout, StackedConv(EXPERTS, (1, SIDE, SIDE), LAYERS, [50, 50])

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=self.layout)
        for place, (weight, bias) in enumerate(zip(self.experts.weights, self.experts.biases, strict=True)):
            x = F.conv2d(x, weight.flatten(0, 1), bias.flatten(), groups=EXPERTS if place else 1)
            x = F.relu(F.max_pool2d(x, 2))
        outputs: Tensor = self.experts.dense(x.reshape(len(x), EXPERTS, FEATURES))
        return outputs


class Loop(nn.Module):
    """Stacked parameters, torch's convolution and pooling, one expert after the other, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = StackedConv(EXPERTS, (1, SIDE, SIDE), LAYERS, [50, 50])

    def forward(self, x: Tensor) -> Tensor:
        x, outputs = x.contiguous(memory_format=torch.channels_last), []
        for expert in range(EXPERTS):
            h = x
            for weight, bias in zip(self.experts.weights, self.experts.biases, strict=True):
                h = F.relu(F.max_pool2d(F.conv2d(h, weight[expert], bias[expert]), 2))
            outputs.append(h.flatten(1))
        result: Tensor = self.experts.dense(torch.stack(outputs, 1))
        return result


def on_subsets(modules: nn.ModuleList, pairs: Pairs, x: Tensor) -> Tensor:
    """Give every module the samples that want it."""
    samples = torch.split(pairs.sample, pairs.counts)
    return torch.cat([expert(x[rows]) for expert, rows in zip(modules, samples, strict=True)])


def main(rounds: int) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    modules, loop, stacked = separate(), Loop(), StackedConv(EXPERTS, (1, SIDE, SIDE), LAYERS, [50, 50])
    contenders: dict[str, Callable[[Tensor], Tensor]] = {
        "separate modules": lambda x: torch.stack([expert(x) for expert in modules], 1),
        "loop, channels last": loop,
        "grouped convolution": Grouped(torch.contiguous_format),
        "grouped, channels last": Grouped(torch.channels_last),
        "ours, dense": stacked,
    }
    for k in (4, 8, 10, 12):
        chosen = torch.rand(ROWS, 1, EXPERTS)
        pairs = Pairs.of((chosen >= chosen.topk(k, -1).values[..., -1:]).float())
        contenders[f"ours, sparse {k} of 16"] = partial(stacked.on_pairs, pairs=pairs)
        if k == 4:
            contenders["separate modules, 4 of 16"] = partial(on_subsets, modules, pairs)
    forward: dict[str, list[float]] = {name: [] for name in contenders}
    both: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            for repetition in range(3):
                x = torch.rand(ROWS, 1, SIDE, SIDE)
                start = time.perf_counter()
                outputs = contender(x)
                middle = time.perf_counter()
                outputs.sum().backward()
                end = time.perf_counter()
                if number and repetition:  # the first of a block and of all warm up
                    forward[name].append(middle - start)
                    both[name].append(end - start)
    base = statistics.median(both["separate modules"])
    for name in contenders:
        once, twice = statistics.median(forward[name]), statistics.median(both[name])
        print(f"{name:28} forward {1000 * once:7.1f} ms   both {1000 * twice:7.1f} ms   {twice / base:5.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
