"""Stop a run whose processes differ, or whose loss, gradients or weights are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from mtl.checks import InputError
from mtl.distributed import gather, gather_full, world_size
from mtl.files.run_files import flatten

MAY_DIFFER = {"overrides", "ckpt", "evaluate", "paths"}  # between processes: where each one reads and writes
EVERY = 50  # steps between checks of the gradients, and on GPUs of the loss


class ProcessAgreement(Callback):
    """Compare the configuration of all processes before the first step; InputError if they differ.

    DDP itself gives all processes the weights and buffers of rank 0.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or world_size() == 1:
            return
        config = {key: repr(value) for key, value in flatten(pl_module.config).items()}
        folder = config["paths.run_dir"].strip("'")  # may differ: only rank 0 writes files
        compared = {key: value for key, value in config.items() if key.split(".")[0] not in MAY_DIFFER}
        config = {key: value.replace(folder, "<run>") for key, value in compared.items()}
        first, *others = gather(config)
        advice = "Start all with the same command line; a sweep (-m) takes one device per job."
        for rank, theirs in enumerate(others, start=1):
            keys = [k for k in theirs.keys() | first.keys() if theirs.get(k) != first.get(k)]
            keys.sort(key=lambda key: (key.count("."), key))  # top-level keys first: others may be derived from them
            if keys:
                differences = "; ".join(f"{key} is {theirs.get(key)}, not {first.get(key)}" for key in keys[:3])
                other = f"process {rank} has a different configuration from process 0"
                raise InputError(f"{other}: {differences}. {advice}")


class FiniteGuard(Callback):
    """Raise InputError when the loss, a gradient or a weight is NaN or infinite.

    The message names the parameter and, if it is stacked, the expert or task. On a CPU the loss is checked before every
    update, so that a bad loss never changes the weights. On other devices the loss is checked every ``EVERY`` steps, as
    are the gradients on all devices. Weights are checked before a checkpoint is written, so that a bad checkpoint never
    replaces the last good one. A trainer that scales the loss (float16) skips a step with infinite gradients and halves
    the scale, so they count only once the scale is below 1.
    """

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if loss.device.type != "cpu" and trainer.global_step % EVERY:
            return  # reading the loss would make the CPU wait for the device
        value = float(loss.detach())
        if not math.isfinite(value) and not _may_rescale(trainer):
            _stop(trainer, f"the loss is {value}", _culprits(pl_module, _own_part))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        culprits = [] if trainer.global_step % EVERY else _culprits(pl_module, lambda p: p.grad)
        if culprits and not _may_rescale(trainer):
            _stop(trainer, "a gradient is not finite", culprits)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        culprits = _culprits(pl_module, lambda p: p)
        if culprits:
            _stop(trainer, "a weight is not finite", culprits)


def _may_rescale(trainer: Trainer) -> bool:
    """Return whether to excuse infinite gradients, since the trainer may still lower its scale of the loss."""
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and scaler.get_scale() >= 1


def _own_part(parameter: Any) -> Tensor:
    """Return the local part of a parameter: gathering it would wait for processes whose loss is finite."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _culprits(module: nn.Module, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> list[str]:
    """Return the parameters that contain NaN or infinity, with the affected indices of their first dimension."""
    culprits = []
    for name, parameter in module.named_parameters():
        value, rows = tensor_of(parameter), None
        if value is not None and value.is_sparse:
            value = value.coalesce()
            rows, value = value.indices()[0], value.values()
        # Quick test: a finite sum implies finite elements. Finite elements can have an infinite sum, so check again
        # below
        if value is None or torch.isfinite(gather_full(value.sum())):
            continue
        value = gather_full(value)
        bad = ~torch.isfinite(value)
        if bad.any():
            bad_rows = bad.flatten(1).any(1).nonzero().flatten() if value.dim() > 1 else bad.new_zeros(0)
            indices = (bad_rows if rows is None else rows[bad_rows]).tolist()
            kind = "experts" if ".experts." in name else "tasks" if ".gate." in name or ".heads." in name else "rows"
            culprits.append(f"{name} ({kind} {', '.join(map(str, indices[:8]))})" if indices else name)
    return culprits


def _stop(trainer: Trainer, what: str, culprits: list[str]) -> None:
    location = f" in {'; '.join(culprits[:4])}" if culprits else "; all weights are finite"
    raise InputError(
        f"step {trainer.global_step}: {what}{location}. The last checkpoint was saved before that. Try a lower "
        "optimizer.lr or trainer.gradient_clip_val=1, and check the data for extreme values"
    )
