"""Show training images with their labels in a grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from mtl.loggers.pictures import save_picture
from mtl.options import CountOrZero, validated
from mtl.types import MISSING_CLASS, Batch


class ExampleImages(Callback):
    """Write the first ``count`` training images to ``<dirpath>/examples.png``, and show them in the loggers.

    Does nothing if the inputs contain no uint8 images ``[B, C, H, W]``, or if ``count`` is 0.
    """

    @validated
    def __init__(self, dirpath: str, count: CountOrZero = 36) -> None:
        self.file, self.count = Path(dirpath) / "examples.png", count

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch | Sequence[Batch], batch_idx: int
    ) -> None:
        if trainer.global_step or batch_idx or not trainer.is_global_zero or not self.count:
            return
        first = batch if isinstance(batch, Batch) else batch[0]
        images = [x for x in first.inputs.values() if x.dim() == 4 and x.dtype == torch.uint8]
        if not images:
            return
        picture = grid(images[0][: self.count].cpu(), captions(first.targets, min(self.count, len(first))))
        save_picture(picture, self.file, trainer.loggers, 0)


def captions(targets: dict[str, Tensor], count: int) -> list[str]:
    """Return a caption for each of the first ``count`` rows: labels in task order, then the attributes that are 1.

    ``targets[task]`` has shape ``[B]``. A missing label is shown as "?".
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
    """Draw ``images [N, C, H, W]`` (uint8, C = 1 or 3) in a grid, each with its title above it."""
    columns = max(1, round(len(images) ** 0.5))
    lines = max(title.count("\n") for title in titles) + 1
    side, line = 1.1, 0.14  # inches
    width, height = side + 0.15, side + 0.1 + line * lines
    figure = Figure(figsize=(width * columns, height * -(-len(images) // columns)))
    axes = figure.add_axes((0, 0, 1, 1))  # one axes for all images, in inches: one per image would take seconds
    axes.set_axis_off()
    for index, (image, title) in enumerate(zip(images.permute(0, 2, 3, 1).numpy(), titles, strict=True)):
        left, bottom = (index % columns + 0.5) * width - side / 2, (index // columns + 1) * height - 0.04
        axes.imshow(image, cmap="gray", vmin=0, vmax=255, extent=(left, left + side, bottom, bottom - side))
        place = (left + side / 2, bottom - side - 0.03)
        axes.text(*place, title, ha="center", va="bottom", fontsize=8 if lines == 1 else 6)
    axes.set(xlim=(0, figure.get_figwidth()), ylim=(figure.get_figheight(), 0), aspect="auto")
    return figure
