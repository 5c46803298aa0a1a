"""Report how the gates of any network route: scalars, figures and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer

from mtl.analysis.flops import expert_flops, forward_flops
from mtl.analysis.patterns import (
    active_by_kind,
    compare_groups,
    compare_selections,
    component_names,
    connections,
    is_routed,
    layers_with_gates,
)
from mtl.analysis.report import Report
from mtl.analysis.tally import History, Probabilities, RoutingStats, gather_routing_stats
from mtl.distributed import gather, summon_full_params
from mtl.gates.base import DrawsConnections
from mtl.gates.permuted import Permutation
from mtl.loggers.pictures import save_picture
from mtl.options import Count, CountOrZero, validated
from mtl.training.measurements import Key, Measurement, Measurements, log_measurements
from mtl.training.module import MultiTaskModule, is_logged
from mtl.types import Batch, Routing

from .phase_length import did_step

# The scalars that a validation pass may log; in a network of several layers the names end in _layer_<n>
LOGGED = ("experts_per_sample", "union_per_sample", "routing_entropy", "dead_experts", "idle_tasks", "binary_selectors")
LOGGED_OF_LAYERS = ("active_connections", "distinct_patterns", "pattern_jaccard")

PASSES_PER_STEP = 3  # forward passes that cost as much as a step: the backward pass has two products for each one


class RoutingMonitor(Callback):
    """Log, draw and save how the gate of each mixture or routed layer routes.

    Scalars over each validation and test pass, ``<stage>/<scalar>``:

    * ``experts_per_sample``: number of weights of at least 1e-5, mean over samples and tasks
    * ``union_per_sample``: number of experts that at least one task of the sample uses
    * ``routing_entropy``: entropy of a sample's weights in nats
    * ``dead_experts``: number of experts whose weight is 0 for every sample
    * ``idle_tasks``: share of (sample, task) pairs without any expert; logged only if it is not 0
    * ``binary_selectors``: share of the selectors that are exactly one-hot

    In a network of several layers these names end in ``_layer_<n>``. A network with several layers or one routed layer
    whose gates do not depend on the example logs the scalars of ``mtl.analysis.patterns`` instead.

    The results of a test, but not the loggers, also have:

    * ``<task>/experts_per_sample``, and the mean weights ``<task>/expert_share_<expert>`` if there are at most
      ``max_shares`` weights
    * ``flops_dense`` and ``flops_selected``: FLOPs per sample with all experts, and with only the experts in use; where
      samples differ in length, FLOPs of the first row
    * ``multiply_adds``: multiply-adds per sample, each expert as often as tasks use it, and of COMET's trees only the
      paths of nonzero probability. This is the unit of COMET's table 6; the execution computes an expert once for all
      tasks, and every split of a tree
    * after a training, ``training/flops_dense`` and ``training/flops_selected``: the same for forward and backward
      pass, averaged over every ``trainer.log_every_n_steps``-th batch
    * after a training, ``training/binary_after``: the share of the steps after which at least 99 % of the selectors are
      one-hot; NaN if fewer are at the end (DSelect-k, table C.1)
    * of simulated data, how the selections compare with the ground truth: see ``mtl.analysis.patterns``

    After the test, figures (PNG) and tables (CSV) are written to ``dirpath``, and the loggers show the figures. With
    ``figures_every_n_epochs``, the figures are also drawn after every ``figures_every_n_epochs`` epochs; without
    ``figures``, never.
    """

    @validated
    def __init__(
        self,
        dirpath: str,
        max_shares: CountOrZero = 256,
        figures: bool = True,
        figures_every_n_epochs: Count | None = None,
    ) -> None:
        self.folder, self.max_shares = Path(dirpath), max_shares
        self.figures, self.figures_every_n_epochs = figures, figures_every_n_epochs
        self.histories: dict[str, History] = {}
        self.probabilities = Probabilities()
        self._tallies: dict[str, RoutingStats] = {}
        self._gates: dict[str, Any] = {}  # in a test
        self._sample: Batch | None = None
        self._compared: list[tuple[int, dict[str, float]]] = []  # rows and ``compare_selections`` of each test batch
        self._trained = 0  # steps

    def logged_names(self) -> list[str]:
        """Return patterns of the names that a validation pass may log."""
        return [f"val/{name}{end}" for name in (*LOGGED, *LOGGED_OF_LAYERS) for end in ("", "_layer_*")]

    def on_train_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        self._add_probabilities(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: MultiTaskModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if not did_step(trainer, batch_idx) or not is_logged(trainer, trainer.global_step - 1):
            return
        self._add_probabilities(trainer, pl_module)
        for name, routings in outputs["routings"].items():
            history = self.histories.setdefault(name, History())
            history.add(trainer.global_step, routings, self.max_shares, len(pl_module.tasks))

    def on_train_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        self._add_probabilities(trainer, pl_module)
        self._trained = trainer.global_step

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        self._tallies, self._gates = {}, {}

    def on_test_epoch_start(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        self._tallies, self._sample, self._compared = {}, None, []
        self._gates = {name: layer.gate for name, layer in layers_with_gates(pl_module.network).items()}

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: MultiTaskModule, outputs: Any, batch: Batch, *index: int
    ) -> None:
        self._add(pl_module, outputs["routings"], len(batch))

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: MultiTaskModule, outputs: Any, batch: Batch, *index: int
    ) -> None:
        self._add(pl_module, outputs["routings"], len(batch))
        routings = list(outputs["routings"].values())
        if len(routings) == 1 and routings[0].tasks is None and len(batch):
            self._compared.append((len(batch), compare_selections(routings[0], _extras(trainer))))
        if self._sample is None and len(batch):
            self._sample = batch.with_inputs_as(pl_module.dtype)  # type: ignore[arg-type]  # Lightning's is str | dtype

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        report = self._report(pl_module)
        log_measurements(trainer, pl_module, _measured("val", report.scalars()))
        due = self.figures_every_n_epochs and (trainer.current_epoch + 1) % self.figures_every_n_epochs == 0
        if due and trainer.is_global_zero and not trainer.sanity_checking:
            self._draw(trainer, report)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        report = self._report(pl_module)
        sample = None if self._sample is None else self._sample.to("cpu").select(torch.tensor([0]))
        samples = [sample for sample in gather(sample) if sample]  # all processes count the FLOPs of the same row
        self._sample = samples[0].to(pl_module.device) if samples else None
        values = report.scalars()
        if matrices := list(report.connections.values()):
            kinds = active_by_kind(list(report.kinds.values()), matrices)
            values |= {f"active_connections_{kind}": share for kind, share in kinds.items()}
            if "task_group" in _extras(trainer):
                values |= compare_groups(matrices, _extras(trainer)["task_group"])
        compared = [pair for part in gather(self._compared) for pair in part]
        for name in compared[0][1] if compared else ():
            values[name] = sum(rows * result[name] for rows, result in compared) / sum(rows for rows, _ in compared)
        flops, training = self._flops(pl_module, report)
        log_measurements(trainer, pl_module, _measured("test", values | flops))
        pl_module.measured.update(report.parts(self.max_shares))
        pl_module.measured.update(_measured("training", training | report.binary_after(self._trained)))
        if report.tallies and trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            report.write_tables(self.folder)
            self._draw(trainer, report)

    def state_dict(self) -> dict[str, Any]:
        histories = {name: asdict(history) for name, history in self.histories.items()}
        return {"histories": histories, "probabilities": asdict(self.probabilities)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.histories = {name: History(**history) for name, history in state_dict["histories"].items()}
        self.probabilities = Probabilities(**state_dict["probabilities"])

    def _add_probabilities(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        layers = layers_with_gates(pl_module.network)
        if any(isinstance(layer.gate, DrawsConnections) for layer in layers.values()):
            with summon_full_params(trainer):
                self.probabilities.add(trainer.global_step, layers)

    def _add(self, pl_module: MultiTaskModule, routings: dict[str, Routing], rows: int) -> None:
        for name, routing in routings.items():
            active_fraction = self._gates[name].active_fraction(routing.selectors) if name in self._gates else 1.0
            self._tallies.setdefault(name, RoutingStats(len(pl_module.tasks))).add(routing, rows, active_fraction)

    def _draw(self, trainer: Trainer, report: Report) -> None:
        for name, picture in report.figures().items() if self.figures else ():
            save_picture(picture, self.folder / f"{name}.png", trainer.loggers, trainer.global_step)

    def _report(self, pl_module: MultiTaskModule) -> Report:
        """Return the report over all processes; every process must call this."""
        tallies, names = gather_routing_stats(self._tallies), list(pl_module.tasks)
        layers = layers_with_gates(pl_module.network)
        if not is_routed(layers) or not tallies or not all(tally.static for tally in tallies.values()):
            layers = {}
        permutations = [part for part in pl_module.modules() if isinstance(part, Permutation)]
        return Report(
            names,
            tallies,
            self.histories,
            self.probabilities,
            {name: connections(layer.gate, len(names)).cpu() for name, layer in layers.items()},
            {name: component_names(layer) for name, layer in layers.items()},
            [(part.matrix().cpu(), part.soft().cpu(), part.is_hard) for part in permutations],
        )

    def _flops(self, pl_module: MultiTaskModule, report: Report) -> tuple[dict[str, float], dict[str, float]]:
        """Return the FLOPs and multiply-adds per sample as results have them, for test and training."""
        if self._sample is None:
            return {}, {}
        network: Any = pl_module.network
        inputs, tasks = self._sample.inputs, list(self._sample.targets)  # a sample may belong to some tasks only
        index = [number for number, name in enumerate(pl_module.tasks) if name in tasks]
        counts = forward_flops(network, inputs, tasks)
        dense = selected = trained = published = float(counts[""])
        for name, flops in expert_flops(network, inputs, tasks).items():
            if name in report.tallies:
                tally, width = report.tallies[name], network.get_submodule(name).experts.output_dim
                num_tasks, num_experts = tally.share.shape
                unused = num_experts - tally.union / tally.rows
                zeros = num_experts - tally.mixed / tally.task_rows.clamp(min=1)  # [T], or of other gates
                rows = index if num_tasks == len(pl_module.tasks) else list(range(num_tasks))
                unmixed = float(zeros[rows].sum())
                # An unused expert saves its own FLOPs, a zero weight one multiply-add for each output of its expert
                selected -= unused * flops + 2 * unmixed * width
                active = float((tally.active / tally.task_rows.clamp(min=1))[rows].sum())
                published += (active - num_experts) * flops - 2 * (len(rows) * num_experts - active) * width
                published -= (1 - tally.active_fraction / tally.rows) * counts.get(f"{name}.gate", 0)
                history = report.histories.get(name, History())
                trained -= (history.unused * flops + 2 * history.unmixed * width) / max(1, history.batches)
        looked = self._trained and any(history.batches for history in report.histories.values())
        step = {"flops_dense": PASSES_PER_STEP * dense, "flops_selected": PASSES_PER_STEP * trained} if looked else {}
        return {"flops_dense": dense, "flops_selected": selected, "multiply_adds": published / 2}, step


def _measured(split: str, values: Mapping[str, float]) -> Measurements:
    """Return ``values``, by name, as numbers of all tasks."""
    return Measurements({Key(split, "", name): Measurement(value) for name, value in values.items()})


def _extras(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return what the data module knows beside the rows."""
    spec = getattr(getattr(trainer, "datamodule", None), "spec", None)
    return spec.ground_truth if spec else {}
