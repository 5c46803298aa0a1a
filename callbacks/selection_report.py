"""Compare the experts that a gate selects with what a simulation knows."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from mtl.analysis.selection import heaviest_experts, jaccard_by_group, selected_experts
from mtl.parallel import gather
from mtl.types import Routing


class SelectionReport(Callback):
    """Log at test what only simulated data can tell; does nothing on other data.

    ``test/true_experts_found``: of N ``extras["true_experts"]``, how many are among the N experts of largest weight
    (a weight of 0 does not count), mean over samples and tasks.
    ``test/jaccard_related``, ``test/jaccard_unrelated``: mean Jaccard index of the selections of two tasks of the same,
    of different, ``extras["task_group"]``.
    """

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sums: dict[str, float] = {}
        self._rows = 0

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        routing: Routing | None = outputs["routing"]
        spec = getattr(getattr(trainer, "datamodule", None), "spec", None)
        if routing is None or routing.tasks is not None or spec is None or not len(batch):
            return
        chosen = selected_experts(routing)
        chosen = chosen if chosen.dim() == 3 else chosen[None]
        values: dict[str, Tensor] = {}
        if "true_experts" in spec.extras:
            true = spec.extras["true_experts"].to(chosen.device)
            largest = heaviest_experts(routing.weights, len(true))
            values["true_experts_found"] = largest[..., true].sum(-1).double().mean()
        if "task_group" in spec.extras:
            values |= jaccard_by_group(chosen, spec.extras["task_group"])
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value) * len(batch)
        self._rows += len(batch)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        everyone = gather((self._rows, self._sums))
        rows = sum(count for count, _ in everyone)
        names = {name: None for _, sums in everyone for name in sums}
        pl_module.log_dict({f"test/{n}": sum(sums.get(n, 0.0) for _, sums in everyone) / rows for n in names})
