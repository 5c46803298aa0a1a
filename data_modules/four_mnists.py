"""Four MNISTs as four tasks: two upright copies and two rotated ones (Maziarz et al. 2019, section 6.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtl.options import Address, FilePath, validated
from mtl.types import Batch, DataSpec, Image, TaskSpec

from .files.images import pixel_scale
from .files.mnist import CLASSES, SIDE, prepare, read_splits
from .splits import SPLITS, Rows
from .task_batches import TasksDataModule


class FourMNISTsDataModule(TasksDataModule):
    """Tasks ``mnist_1``, ``mnist_2``, ``rotated_1``, ``rotated_2``: which digit does an image show?

    Input: ``image`` ``[B, 1, 28, 28]`` (uint8). The first two tasks have MNIST's images, the others the same images
    rotated by 90 degrees clockwise. In training, each task has its own order. Test: the official test images.
    Validation, which the paper does not have: a sixth of the training images, drawn with ``seed`` and the same for all
    tasks, so that no task is validated on images that another one is trained on. ``rows`` limits train, val and test
    of each task; None takes all. ``ground_truth["task_group"] [4]`` has the same number for the copies of a task.
    """

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        rows: Rows | None = None,
        download: bool = True,
        base_url: Address | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.rows, self.folder = rows, data_dir / "MNIST"
        self.download, self.base_url = download, base_url

    def prepare_data(self) -> None:
        prepare(self.folder, "mnist", self.download, self.base_url)

    def load_tasks(self) -> tuple[DataSpec, dict[str, dict[str, Batch]]]:
        limits = dict(zip(SPLITS, self.rows or [None] * 3, strict=True))
        tasks: dict[str, dict[str, Batch]] = {split: {} for split in SPLITS}
        upright = read_splits(self.folder, self.generator())
        rotated = {split: (rotate_clockwise(images), digits) for split, (images, digits) in upright.items()}
        for name, parts in {"mnist": upright, "rotated": rotated}.items():
            for task in (f"{name}_1", f"{name}_2"):
                for split, (images, digits) in parts.items():
                    limit = limits[split]
                    tasks[split][task] = Batch({"image": images[:limit, None]}, {task: digits[:limit]})
        mean, std = pixel_scale(tasks["train"]["mnist_1"].inputs["image"])  # the same for rotated images
        specs = [TaskSpec(task, "multiclass", CLASSES) for task in tasks["train"]]
        copies = {"task_group": torch.arange(2).repeat_interleave(2)}
        return DataSpec({"image": Image(1, SIDE, SIDE, mean, std)}, specs, copies), tasks


def rotate_clockwise(images: Tensor) -> Tensor:
    """Return ``images [N, H, W]`` rotated by 90 degrees clockwise, ``[N, W, H]``."""
    return torch.rot90(images, k=-1, dims=(-2, -1)).contiguous()
