"""Compare the experts that a gate selects with the ground truth of simulated data."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from mtl.analysis.patterns import heaviest_experts, jaccard_by_group, selected_experts
from mtl.distributed import gather
from mtl.training.values import log_values
from mtl.types import Routing, widest


class SelectionReport(Callback):
    """At test, compare the selections of a network's only mixture layer with the ground truth of simulated data.

    ``test/true_experts_found``: how many of the N experts in ``extras["true_experts"]`` are among the N with the
    largest nonzero weights, mean over samples and tasks.
    ``test/jaccard_related`` and ``test/jaccard_unrelated``: mean Jaccard index of the selections of two tasks in the
    same group and in different groups of ``extras["task_group"]``; ``test/distinct_experts``: how many experts a task
    selects, where selectors that agree count once.
    Other data have neither entry, so nothing is logged.
    """

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sums: dict[str, float] = {}
        self._rows = 0

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *index: int
    ) -> None:
        routings: list[Routing] = list(outputs["routings"].values())
        spec = getattr(getattr(trainer, "datamodule", None), "spec", None)
        if len(routings) != 1 or routings[0].tasks is not None or spec is None or not len(batch):
            return
        [routing] = routings
        chosen = selected_experts(routing)
        chosen = chosen if chosen.dim() == 3 else chosen[None]
        values: dict[str, Tensor] = {}
        if "true_experts" in spec.extras:
            true = spec.extras["true_experts"].to(chosen.device)
            largest = heaviest_experts(routing.weights, len(true))
            values["true_experts_found"] = widest(largest[..., true].sum(-1)).mean()
        if "task_group" in spec.extras:
            values |= jaccard_by_group(chosen, spec.extras["task_group"])
            values["distinct_experts"] = widest(chosen.sum(-1)).mean()
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value) * len(batch)
        self._rows += len(batch)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        everyone = gather((self._rows, self._sums))
        rows = sum(count for count, _ in everyone)
        names = {name: None for _, sums in everyone for name in sums}
        log_values(trainer, {f"test/{n}": sum(sums.get(n, 0.0) for _, sums in everyone) / rows for n in names})
