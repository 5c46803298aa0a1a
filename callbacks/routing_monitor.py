"""Report what the gate does: numbers, pictures and files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor

from mtl.analysis import figures
from mtl.flops import expert_flops, forward_flops
from mtl.functional import entropy
from mtl.module import is_logged
from mtl.parallel import gather, total, world_size
from mtl.permutation import Permutation
from mtl.types import Batch, Routing


@dataclass
class Tally:
    """Add up what a gate does for ``num_tasks`` tasks, over batches and processes."""

    num_tasks: int
    rows: int = 0
    seen: Any = 0.0  # [T] rows that were for a task
    active: Any = 0.0  # [T] nonzero weights
    idle: float = 0.0  # samples for which a task uses no expert, mean over tasks
    share: Any = 0.0  # [T, E] weights
    union: float = 0.0  # experts that some task uses
    entropy: float = 0.0  # of the weights, mean over tasks
    binary: float = 0.0  # selectors that are exactly one expert
    selectors: float = 0.0

    def add(self, routing: Routing, rows: int) -> None:
        """Add a batch of ``rows`` samples."""
        if not rows:
            return
        weights = routing.weights.detach().double()  # sums that do not depend on how rows fell into batches
        weights = weights if weights.dim() == 3 else weights.expand(rows, -1, -1)
        active = weights > 0
        self.rows += rows
        self.seen = self.seen + self._spread(weights.new_full((weights.shape[1],), rows), routing.tasks)
        self.active = self.active + self._spread(active.sum((0, 2)).double(), routing.tasks)
        self.idle += float((~active.any(-1)).double().mean(-1).sum())
        self.share = self.share + self._spread(weights.sum(0), routing.tasks)
        self.union += float(active.any(1).sum())
        self.entropy += float(entropy(weights).mean(-1).sum())
        if routing.selectors is not None:
            self.binary += binary_share(routing.selectors) * rows
            self.selectors += rows

    def everywhere(self) -> Tally:
        """Return the sum over all processes; each has to call it."""
        parts = [part for part in gather(self) if part.rows]
        joined = Tally(self.num_tasks)
        for part in parts:
            for name in ("rows", "seen", "active", "idle", "share", "union", "entropy", "binary", "selectors"):
                setattr(joined, name, getattr(joined, name) + getattr(part, name))
        return joined

    def shares(self) -> Tensor:
        """Return the mean weights ``[T, E]``."""
        shares: Tensor = self.share / self.seen.clamp(min=1)[:, None]
        return shares

    def _spread(self, values: Tensor, tasks: Sequence[int] | None) -> Tensor:
        """Return ``values [t, ...]`` of ``tasks`` (None: all) as those of all tasks, ``[T, ...]``, 0 for the others."""
        if tasks is None:
            return values
        index = torch.tensor(tasks, device=values.device)
        return values.new_zeros(self.num_tasks, *values.shape[1:]).index_copy_(0, index, values)

    def values(self, names: Sequence[str], limit: int) -> dict[str, float]:
        """Return the scalars to log; those of single tasks and experts only up to ``limit`` of them."""
        active, share = self.active / self.seen.clamp(min=1), self.shares()
        values = {
            "experts_per_sample": float(active.mean()),
            "union_per_sample": self.union / self.rows,
            "routing_entropy": self.entropy / self.rows,
            "dead_experts": float((share.sum(0) == 0).sum()),
        }
        if self.idle:
            values["idle_tasks"] = self.idle / self.rows
        if self.selectors:
            values["binary_selectors"] = self.binary / self.selectors
        if len(names) <= limit:
            values |= {f"experts_per_sample/{name}": float(n) for name, n in zip(names, active, strict=True)}
        if share.numel() <= limit:
            for name, row in zip(names, share.tolist(), strict=True):
                values |= {f"expert_share/{name}/{expert:02d}": value for expert, value in enumerate(row)}
        return values


@dataclass
class History:
    """Keep the experts' mean weights in training, and since when the selectors are binary."""

    steps: list[int] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)  # [T, E] each
    binary_since: int = -1  # -1: not yet, or not any more

    def add(self, step: int, routing: Routing, limit: int) -> None:
        """Add the training batch of ``step``, whose share is the mean over all processes; not if of some tasks only."""
        if routing.tasks is not None:
            return
        weights = routing.weights.detach()
        share = weights.mean(0) if weights.dim() == 3 else weights
        if routing.selectors is not None:
            binary = float(total(torch.tensor(binary_share(routing.selectors), device=share.device))) / world_size()
            self.binary_since = -1 if binary < 1 else step if self.binary_since < 0 else self.binary_since
        if share.numel() <= limit:
            self.steps.append(step)
            self.shares.append((total(share.float()) / world_size()).cpu())
        if len(self.steps) > 1000:  # every second one says as much
            self.steps, self.shares = self.steps[::2], self.shares[::2]


class RoutingMonitor(Callback):
    """Log, draw and write down how the gate routes.

    Scalars over each validation and test pass: ``<stage>/experts_per_sample`` (nonzero weights of a sample, mean over
    samples and tasks; of each task below it), ``union_per_sample`` (experts that some task uses), ``routing_entropy``
    (nats, of a sample's weights), ``dead_experts`` (weight 0 for every sample), ``idle_tasks`` (share of samples and
    tasks without any expert, if there are such), ``binary_selectors`` (share of those
    that are exactly one expert), ``expert_share/<task>/<expert>`` (mean weight; for at most ``max_shares`` pairs).
    ``train/binary_since_step``: since when all selectors of the looked-at batches are, -1 if not.

    Pictures in TensorBoard after every ``pictures_every`` epochs (None: none at all), and after the test as PNG and CSV
    in ``dirpath``: task x expert heat map, permutation matrix, experts' weights over training. ``test/flops_dense`` and
    ``test/flops_selected``: operations of a sample through the network, with all experts and with those in use.
    """

    def __init__(self, dirpath: str, max_shares: int = 256, pictures_every: int | None = 5) -> None:
        self.folder, self.max_shares, self.pictures_every = Path(dirpath), max_shares, pictures_every
        self.history, self._tally = History(), Tally(0)
        self._sample: dict[str, Tensor] | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        routing: Routing | None = outputs["routing"]
        if routing is None or not is_logged(trainer, trainer.global_step - 1):
            return
        self.history.add(trainer.global_step, routing, self.max_shares)
        if routing.selectors is not None:
            pl_module.log("train/binary_since_step", float(self.history.binary_since))

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tally = Tally(len(_task_names(pl_module)))

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tally, self._sample = Tally(len(_task_names(pl_module))), None

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, *index: int
    ) -> None:
        if outputs["routing"] is not None:
            self._tally.add(outputs["routing"], len(batch))

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, *index: int
    ) -> None:
        if outputs["routing"] is not None:
            self._tally.add(outputs["routing"], len(batch))
        if self._sample is None and len(batch):
            self._sample = batch.inputs

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        tally = self._log("val", pl_module)
        if tally is None or not trainer.is_global_zero or not self.pictures_every:
            return
        if trainer.current_epoch % self.pictures_every:
            return
        for name, picture in self._pictures(pl_module, tally).items():
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure(f"routing/{name}", picture, trainer.global_step)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        tally = self._log("test", pl_module)
        self._log_flops(pl_module, tally)
        if tally is None or not trainer.is_global_zero:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, picture in self._pictures(pl_module, tally).items():
            picture.savefig(self.folder / f"{name}.png", dpi=120)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure(f"routing/{name}_tested", picture, trainer.global_step)
        self._write_tables(pl_module, tally)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.history.steps, "shares": self.history.shares, "binary_since": self.history.binary_since}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = History(list(state_dict["steps"]), list(state_dict["shares"]), state_dict["binary_since"])

    def _log(self, stage: str, pl_module: LightningModule) -> Tally | None:
        tally = self._tally.everywhere()
        if not tally.rows:
            return None
        values = tally.values(_task_names(pl_module), self.max_shares)
        pl_module.log_dict({f"{stage}/{name}": value for name, value in values.items()})
        return tally

    def _log_flops(self, pl_module: LightningModule, tally: Tally | None) -> None:
        if self._sample is None:
            return
        network: Any = pl_module.network
        dense = selected = float(forward_flops(network, self._sample))
        if tally is not None and hasattr(network, "experts"):
            num_tasks, num_experts = tally.share.shape
            unused = num_experts - tally.union / tally.rows
            unmixed = num_tasks * num_experts - float((tally.active / tally.seen.clamp(min=1)).sum())
            selected -= unused * expert_flops(network, self._sample) + 2 * unmixed * network.experts.output_dim
        pl_module.log_dict({"test/flops_dense": dense, "test/flops_selected": selected})

    def _pictures(self, pl_module: LightningModule, tally: Tally) -> dict[str, Any]:
        names: list[str] = _task_names(pl_module)
        if not self.pictures_every:
            return {}
        pictures = {"expert_share": figures.heat_map(tally.shares(), names)}
        for matrix in _permutations(pl_module):
            pictures["permutation"] = figures.permutation(*matrix, names)
        if len(self.history.steps) > 1:
            pictures["weights_over_training"] = figures.courses(
                self.history.steps, torch.stack(self.history.shares), names, self.history.binary_since
            )
        return pictures

    def _write_tables(self, pl_module: LightningModule, tally: Tally) -> None:
        names: list[str] = _task_names(pl_module)
        share = tally.shares().tolist()
        experts = [f"expert_{number:02d}" for number in range(len(share[0]))]
        _write(
            self.folder / "expert_share.csv", ["task", *experts], [[n, *r] for n, r in zip(names, share, strict=True)]
        )
        for matrix, _, _ in _permutations(pl_module):
            rows = [[p, i, *row] for p, one in enumerate(matrix.tolist()) for i, row in enumerate(one)]
            _write(self.folder / "permutation.csv", ["matrix", "gate_output", *experts], rows)
        rows = [
            [step, name, *values]
            for step, shares in zip(self.history.steps, self.history.shares, strict=True)
            for name, values in zip(names, shares.tolist(), strict=True)
        ]
        _write(self.folder / "weights_over_training.csv", ["step", "task", *experts], rows)


def binary_share(selectors: Tensor) -> float:
    """Return the share of ``selectors [..., E]`` that are exactly one expert."""
    return float((selectors.detach() == 1).any(-1).float().mean())


@torch.no_grad()
def _task_names(module: LightningModule) -> list[str]:
    tasks: Any = module.tasks
    return list(tasks)


def _permutations(module: LightningModule) -> list[tuple[Tensor, Tensor, bool]]:
    """Return hard matrix, soft matrix and whether it is hard, of the network's permutation if it has one."""
    found = [part for part in module.modules() if isinstance(part, Permutation)]
    return [(part.matrix().cpu(), part.soft().cpu(), part.is_hard) for part in found[:1]]


def _write(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
