"""Time Multi-MNIST's 16 convolutional experts, relative to separate modules and to a loop in plain torch.

python benchmarks/conv.py [--rounds N]. Batches of 512, forward and backward, all in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common import medians, options, take_turns, write

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.experts.conv import StackedConv
from mtl.experts.pairs import Pairs

EXPERTS, ROWS, SIDE, FEATURES = 16, 512, 36, 720
BASELINE = "separate modules"
LAYERS = [{"channels": 10, "kernel": 5, "pool": 2}, {"channels": 20, "kernel": 5, "pool": 2}]


def separate() -> nn.ModuleList:
    """Return the experts as ordinary modules."""

    def expert() -> nn.Sequential:
        conv = [nn.Conv2d(1, 10, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(10, 20, 5), nn.ReLU(), nn.MaxPool2d(2)]
        dense = [nn.Linear(FEATURES, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU()]
        return nn.Sequential(*conv, nn.Flatten(), *dense)

    return nn.ModuleList(expert() for _ in range(EXPERTS))


def loop(experts: StackedConv, x: Tensor) -> Tensor:
    """Return the outputs of ``experts``, computed one after the other with torch's layers, channels last."""
    x, outputs = x.contiguous(memory_format=torch.channels_last), []
    for expert in range(EXPERTS):
        h = x
        for weight, bias in zip(experts.weights, experts.biases, strict=True):
            h = F.relu(F.max_pool2d(F.conv2d(h, weight[expert], bias[expert]), 2))
        outputs.append(h.flatten(1))
    result: Tensor = experts.dense(torch.stack(outputs, 1))
    return result


def on_subsets(modules: nn.ModuleList, pairs: Pairs, x: Tensor) -> Tensor:
    """Run each module on the samples routed to it."""
    samples = torch.split(pairs.sample, pairs.counts)
    return torch.cat([expert(x[rows]) for expert, rows in zip(modules, samples, strict=True)])


def main() -> None:
    given = options(__doc__, rounds=6)
    modules, stacked = separate(), StackedConv(EXPERTS, (1, SIDE, SIDE), LAYERS, [50, 50])
    contenders: dict[str, Callable[[Tensor], Tensor]] = {
        BASELINE: lambda x: torch.stack([expert(x) for expert in modules], 1),
        "loop, channels last": partial(loop, stacked),
        "ours, dense": stacked,
    }
    for k in (4, 8, 12):
        chosen = torch.rand(ROWS, 1, EXPERTS)
        weights = (chosen >= chosen.topk(k, -1).values[..., -1:]).float()
        pairs = Pairs(weights)
        contenders[f"ours, sparse {k} of 16"] = partial(stacked.pairs_mixture, weights=weights, pairs=pairs)
        if k == 4:
            contenders["separate modules, 4 of 16"] = partial(on_subsets, modules, pairs)

    def forward(contender: Callable[[Tensor], Tensor]) -> Tensor:
        return contender(torch.rand(ROWS, 1, SIDE, SIDE))

    def both(contender: Callable[[Tensor], Tensor]) -> None:
        forward(contender).sum().backward()

    once = medians(take_turns({n: partial(forward, c) for n, c in contenders.items()}, given.rounds, calls=3))
    twice = medians(take_turns({n: partial(both, c) for n, c in contenders.items()}, given.rounds, calls=3))
    rows = [
        {"experts": n, "forward, ms": once[n], "both, ms": twice[n], "of separate": twice[n] / twice[BASELINE]}
        for n in contenders
    ]
    write(given, "conv", "Convolutional experts, forward and backward", rows)


if __name__ == "__main__":
    main()
