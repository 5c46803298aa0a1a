"""Cut out of a trained network what one task uses: ``python -m mtl.prune <run>/checkpoints/best.ckpt``."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mtl  # noqa: F401  (first: it makes torchvision importable)

# isort: split
import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from mtl import build
from mtl.checkpoint import read_checkpoint
from mtl.flops import forward_flops
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.networks.routed import RoutedLayer, RoutedNetwork
from mtl.types import InputError, NetworkOutput, require


class PrunedLayer(nn.Module):
    """Mix components with constant ``weights [C]``; then ``after``."""

    weights: Tensor

    def __init__(
        self, components: Sequence[nn.Module], weights: Tensor, after: nn.Module, sizes: Sequence[int]
    ) -> None:
        super().__init__()
        self.components, self.after, self.sizes = nn.ModuleList(components), after, tuple(sizes)
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.new_zeros(len(x), *self.sizes)
        for weight, component in zip(self.weights, self.components, strict=True):
            mixed = mixed + weight * component(x)
        result: Tensor = self.after(mixed)
        return result


class PrunedMixture(nn.Module):
    """Mix stacked experts with constant ``weights [1, E]``: ``[B, D]`` to ``[B, H]``."""

    weights: Tensor

    def __init__(self, experts: nn.Module, weights: Tensor) -> None:
        super().__init__()
        self.experts = experts
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.experts(x)  # [B, E, H]
        return torch.matmul(self.weights.to(outputs.dtype), outputs)[:, 0]


class PrunedNetwork(nn.Module):
    """The part of a network that task ``name`` uses; it predicts this task alone."""

    def __init__(self, name: str, body: Sequence[nn.Module], heads: Heads | None) -> None:
        super().__init__()
        self.name, self.body, self.heads = name, nn.ModuleList(body), heads

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the task; ``tasks`` is there for the common signature."""
        x = self.body[0](inputs)
        for part in self.body[1:]:
            x = part(x)
        features = x.flatten(1)[:, None]  # [B, 1, F]
        predictions = {self.name: features[:, 0, 0]} if self.heads is None else self.heads(features, [0])
        return NetworkOutput(predictions)


@dataclass(frozen=True)
class Savings:
    """Say what pruning saves: parameters and operations per sample, of the whole network and of the part."""

    parameters: int
    pruned_parameters: int
    flops: int
    pruned_flops: int


@torch.no_grad()
def prune(network: nn.Module, task: str) -> PrunedNetwork:
    """Return what ``task`` uses of a routed network, or of a mixture with static gates, without what chose it.

    Its outputs are those of the network in evaluation. Raises InputError where the choice depends on the example.
    """
    network = copy.deepcopy(network).eval()
    known = isinstance(network, RoutedNetwork | MMoE)
    require(known, f"{type(network).__name__} cannot be pruned: routed networks and mixtures of experts can")
    assert isinstance(network, RoutedNetwork | MMoE)
    names = [spec.name for spec in network.tasks]
    require(task in names, f"no task {task!r}; there are {', '.join(names)}")
    place = names.index(task)
    body = _routed(network, place) if isinstance(network, RoutedNetwork) else _mixture(network, place)
    return PrunedNetwork(task, body, None if network.heads is None else network.heads.only(place))


def savings(network: nn.Module, pruned: nn.Module, inputs: Mapping[str, Tensor]) -> Savings:
    """Count what ``pruned`` has less than ``network``; ``inputs``: a batch, of which one row is taken."""
    before, after = (sum(p.numel() for p in module.parameters()) for module in (network, pruned))
    return Savings(before, after, forward_flops(network.eval(), inputs), forward_flops(pruned.eval(), inputs))


class _Predictor(nn.Module):
    """Give the predictions alone: what an exported program returns are tensors."""

    def __init__(self, network: PrunedNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        predictions: Tensor = self.network(inputs).predictions[self.network.name]
        return predictions


def export(pruned: PrunedNetwork, inputs: Mapping[str, Tensor], path: Path) -> nn.Module:
    """Write ``pruned`` as a program that torch alone can load, for any number of rows; return what was written.

    ``torch.export.load(path).module()`` maps a dict as ``inputs`` to the task's predictions.
    """
    example = {name: torch.zeros_like(value[:2]) for name, value in inputs.items()}  # it is written too: no real rows
    rows = {name: {0: torch.export.Dim.AUTO} for name in example}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own parts
        program = torch.export.export(_Predictor(pruned), (example,), dynamic_shapes=(rows,), strict=True)
        torch.export.save(program, path)
        return torch.export.load(path).module()


def network_from_checkpoint(path: str | Path) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the trained network of a checkpoint, and the inputs of the first batch of its test rows."""
    checkpoint = read_checkpoint(path)
    cfg = OmegaConf.create(checkpoint["config"])
    data: Any = build.build_data(cfg)
    data.prepare_data()
    data.setup()
    network = build.build_network(cfg, data.spec)
    weights = {name: value for name, value in checkpoint["state_dict"].items() if name.startswith("network.")}
    network.load_state_dict({name.removeprefix("network."): value for name, value in weights.items()})
    return network.eval(), dict(next(iter(data.test_dataloader())).inputs)


@torch.no_grad()
def prune_run(path: str | Path, tasks: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Prune the network of a checkpoint for each of ``tasks`` (none: all); return and write what it saves.

    ``folder`` gets ``<task>.pt2`` and ``savings.json``. ``difference`` is the largest
    between the predictions of the written program and of the whole network, on a batch of test rows.
    """
    network, inputs = network_from_checkpoint(path)
    everything: Any = network
    names = [task.name for task in everything.tasks]
    cuts = {task: prune(network, task) for task in tasks or names}  # raises before anything is written
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, dict[str, Any]] = {}
    for task, pruned in cuts.items():
        program = export(pruned, inputs, folder / f"{task.replace('/', '_')}.pt2")
        difference = (program(inputs) - network(inputs, [task]).predictions[task]).abs().max()
        report[task] = dataclasses.asdict(savings(network, pruned, inputs)) | {"difference": float(difference)}
    (folder / "savings.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, prune, and print what it saves."""
    parser = argparse.ArgumentParser(prog="python -m mtl.prune", description=__doc__)
    parser.add_argument("checkpoint", help="as <run>/checkpoints/best.ckpt")
    parser.add_argument("--task", action="append", default=[], help="a task (may be repeated); default all")
    parser.add_argument("--out", type=Path, help="folder to write to; default <run>/pruned")
    given = parser.parse_args(arguments)
    folder = given.out or Path(given.checkpoint).absolute().parent.parent / "pruned"
    try:
        report = prune_run(given.checkpoint, given.task, folder)
    except InputError as error:
        sys.exit(f"error: {error}")
    table = Table(title="what each task keeps of the network, and of its operations per sample", title_justify="left")
    for column in ("task", "parameters", "of", "flops", "of", "largest difference"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for task, row in report.items():
        numbers = [row[name] for name in ("pruned_parameters", "parameters", "pruned_flops", "flops")]
        table.add_row(task, *[f"{number:,}" for number in numbers], f"{row['difference']:.1e}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(folder)


def _routed(network: RoutedNetwork, place: int) -> list[nn.Module]:
    body: list[nn.Module] = [network.bottom, network.stem]
    for layer in network.layers:
        assert isinstance(layer, RoutedLayer)
        weights = layer.gate(None, None, [place]).weights[0]
        used = weights.nonzero().flatten().tolist()
        components = [layer.components[number] for number in used]
        body.append(PrunedLayer(components, weights[used], layer.after, layer.sizes))
    return body


def _mixture(network: MMoE, place: int) -> list[nn.Module]:
    if network.gate.input_dim is not None:
        raise InputError("a gate that looks at the example cannot be pruned: train with network.static_gate=true")
    routing = network.gate(None, None, [place])
    if network.permutation is not None:
        routing = network.permutation(routing, [place], network.gate.sums_to_one)
    weights = routing.weights  # [1, E]
    used = weights[0].nonzero().flatten().tolist()
    experts: Any = network.experts
    for module in experts.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(parameter[used].clone())
        if hasattr(module, "num_experts"):
            module.num_experts = len(used)
    return [network.bottom, PrunedMixture(experts, weights[:, used])]


if __name__ == "__main__":
    main()
