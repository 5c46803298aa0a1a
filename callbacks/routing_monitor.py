"""Report what the gate does with the samples of each evaluation pass."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from mtl.types import Routing


class RoutingMonitor(Callback):
    """Log experts per sample and the share of each expert, for each task, over a validation or test pass.

    ``<stage>/experts_per_sample``: nonzero weights of a sample, mean over samples and tasks, and of each task below
    it. ``<stage>/union_per_sample``: experts with a nonzero weight for some task, what sparse execution would run.
    ``<stage>/expert_share/<task>/<expert>``: mean weight of the expert, written for at most ``max_shares`` pairs.
    """

    def __init__(self, max_shares: int = 256) -> None:
        self.max_shares = max_shares
        self._reset()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset()

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._update(outputs, len(batch))

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._update(outputs, len(batch))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log("val", pl_module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log("test", pl_module)

    def _reset(self) -> None:
        self._rows = 0
        self._active: Tensor | float = 0.0  # [T] nonzero weights, summed over rows
        self._share: Tensor | float = 0.0  # [T, E] weights, summed over rows
        self._union: Tensor | float = 0.0

    def _update(self, outputs: dict[str, Any], rows: int) -> None:
        routing: Routing | None = outputs["routing"]
        if routing is None:
            return
        weights = routing.weights if routing.weights.dim() == 3 else routing.weights.expand(rows, -1, -1)
        active = weights > 0
        self._rows += rows
        self._active = self._active + active.sum((0, 2)).double()
        self._share = self._share + weights.sum(0).double()
        self._union = self._union + active.any(1).sum().double()

    def _log(self, stage: str, pl_module: LightningModule) -> None:
        if not self._rows:
            return
        names = list(pl_module.tasks)  # type: ignore[arg-type, call-overload]
        active, share = torch.as_tensor(self._active) / self._rows, torch.as_tensor(self._share) / self._rows
        values = {"experts_per_sample": float(active.mean()), "union_per_sample": float(self._union) / self._rows}
        if len(names) <= self.max_shares:
            values |= {f"experts_per_sample/{name}": float(n) for name, n in zip(names, active, strict=True)}
        if share.numel() <= self.max_shares:
            for name, row in zip(names, share.tolist(), strict=True):
                values |= {f"expert_share/{name}/{expert:02d}": value for expert, value in enumerate(row)}
        pl_module.log_dict({f"{stage}/{name}": value for name, value in values.items()})
