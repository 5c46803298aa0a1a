"""Show what the network is trained on: a grid of images with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor

from mtl.hooks import need_hook
from mtl.types import MISSING_CLASS, Batch


class ExampleImages(Callback):
    """Write the first ``count`` images of training to ``<dirpath>/examples.png`` and to TensorBoard.

    Does nothing where the inputs hold no images of bytes ``[B, C, H, W]``, or ``count`` is 0.
    """

    def __init__(self, dirpath: str, count: int = 36) -> None:
        self.file, self.count = Path(dirpath) / "examples.png", count

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        need_hook(trainer, self, "on_train_batch_start", True)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch | Sequence[Batch], batch_idx: int
    ) -> None:
        need_hook(trainer, self, "on_train_batch_start", False)
        if trainer.global_step or not trainer.is_global_zero or not self.count:
            return
        first = batch if isinstance(batch, Batch) else batch[0]
        images = [x for x in first.inputs.values() if x.dim() == 4 and x.dtype == torch.uint8]
        if not images:
            return
        picture = grid(images[0][: self.count].cpu(), captions(first.targets, min(self.count, len(first))))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(self.file, dpi=120)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("data/examples", picture, 0)


def captions(targets: dict[str, Tensor], count: int) -> list[str]:
    """Return the labels of each of the first ``count`` rows: classes in order of the tasks, names of true attributes.

    ``targets[task] [B]``; a missing label is "?".
    """
    rows = []
    for row in range(count):
        numbers, names = [], []
        for task, values in targets.items():
            value = values[row]
            if not value.is_floating_point():
                numbers.append("?" if int(value) == MISSING_CLASS else str(int(value)))
            elif value == 1:
                names.append(task.replace("_", " "))
            elif value != 0:
                numbers.append("?" if value.isnan() else f"{float(value):g}")
        rows.append("  ".join([*numbers, "\n".join(names)] if names else numbers))
    return rows


def grid(images: Tensor, titles: Sequence[str]) -> Figure:
    """Draw ``images [N, C, H, W]`` (uint8, one channel or three) in rows, each under its title."""
    columns = max(1, round(len(images) ** 0.5))
    rows = -(-len(images) // columns)
    lines = max(title.count("\n") for title in titles) + 1
    figure = Figure(figsize=(1.25 * columns, (1.35 + 0.12 * lines) * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for place in axes:
        place.set_axis_off()
    for place, image, title in zip(axes, images.permute(0, 2, 3, 1).numpy(), titles, strict=False):
        place.imshow(image, cmap="gray", vmin=0, vmax=255)
        place.set_title(title, fontsize=8 if lines == 1 else 6)
    return figure
