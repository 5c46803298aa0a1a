"""Extract the part of a trained network that a task uses: ``mtl prune RUN``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtl.analysis.flops import forward_flops
from mtl.checks import require
from mtl.files.writing import write_json
from mtl.networks.mixture import MixtureOfExperts
from mtl.networks.routed import RoutedLayer
from mtl.predictions import conditional
from mtl.training.measurements import NETWORK
from mtl.types import Prunable
from mtl.use import program
from mtl.use.export import difference
from mtl.use.program import replace_parts
from mtl.use.trained import load


@torch.no_grad()
def prune(network: nn.Module, task: str) -> nn.Module:
    """Return a copy of the part of ``network`` that ``task`` uses; it predicts only this task, with fixed weights.

    Its outputs equal those of the network in evaluation. Every ``Prunable`` module (mixtures with static gates, routed
    layers, heads) is replaced by its part. Raises InputError if a gate depends on the example, or if the network has no
    gate at all.
    """
    pruned: Any = copy.deepcopy(network).eval()  # prune by the weights of evaluation
    layers = [module for module in network.modules() if isinstance(module, MixtureOfExperts | RoutedLayer)]
    require(bool(layers), f"{type(network).__name__} cannot be pruned: routed networks and mixtures of experts can")
    names = [spec.name for spec in pruned.tasks]
    require(task in names, f"no task {task!r}; the tasks are {', '.join(names)}")
    index = names.index(task)
    replace_parts(pruned, Prunable, lambda part: part.only(index))
    pruned.tasks = [replace(pruned.tasks[index], after=None)]
    result: nn.Module = pruned.eval()  # includes the replaced parts
    return result


def savings(network: nn.Module, pruned: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Count parameters and FLOPs per sample of both networks; ``inputs``: a batch, of which the first row is used."""
    counts: dict[str, Any] = {}
    for prefix, module in (("", network), ("pruned_", pruned)):
        counts[f"{prefix}parameters"] = sum(p.numel() for p in module.parameters())
        counts[f"{prefix}flops"] = forward_flops(module.eval(), inputs)[""]
    return counts


@torch.no_grad()
def prune_run(
    path: str | Path, tasks: Sequence[str], folder: Path, trust: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Prune the network of a checkpoint for each of ``tasks`` (empty: all); return the savings by task.

    Writes ``<task>.pt2`` and ``savings.json`` into ``folder``. ``difference`` is the largest absolute difference
    between the predictions of the exported program and of the full network on random rows; for a regression it is in
    standard units of the labels. Of a task after another, the conditional probability is predicted.
    """
    model = load(path, trust, "cpu", model=NETWORK)
    network, inputs = model.network, program.random_inputs(model.spec.inputs)
    everything: Any = network
    names = [task.name for task in everything.tasks]
    cuts = {task: prune(network, task) for task in tasks or names}  # raises before anything is written
    full, report = program.Readable(network)(inputs), dict[str, dict[str, Any]]()
    for task, pruned in cuts.items():
        cut = program.export(program.Readable(pruned), inputs)
        exported = program.save(cut, folder / f"{task.replace('/', '_')}.pt2")
        spec = everything.tasks[names.index(task)]
        expected = {task: full[conditional(spec) if spec.after else task]}
        report[task] = savings(network, pruned, inputs) | {"difference": difference(model, exported(inputs), expected)}
    write_json(folder / "savings.json", report)
    return report
