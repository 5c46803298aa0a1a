"""Four MNISTs as four tasks: two upright copies and two rotated ones (Maziarz et al. 2019, section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_modules.files.mnist import CLASSES, prepare, read
from data_modules.images import pixel_statistics
from data_modules.splits import SPLITS, check_rows
from data_modules.task_batches import TasksDataModule
from mtl.types import Batch, DataSpec, Image, TaskSpec, require

SIDE = 28
VALIDATION = 6  # one of so many training images belongs to validation


class FourMNISTsDataModule(TasksDataModule):
    """Tasks ``mnist_1``, ``mnist_2``, ``rotated_1``, ``rotated_2``: which digit an image ``[B, 1, 28, 28]`` shows.

    The first two have MNIST's images, the others the same images rotated by 90 degrees clockwise; the order in
    training is each task's own. Test: the official test images. Validation, which the paper has not: a sixth of the
    training images, drawn with ``seed`` and the same for all tasks, so that no task is validated on what another one
    is trained on. ``rows`` caps train, val and test of each task; None takes all.
    """

    def __init__(
        self,
        data_dir: str,
        rows: Sequence[int] | None = None,
        download: bool = True,
        base_url: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if rows is not None:
            check_rows(rows)
        self.rows = None if rows is None else list(rows)
        self.folder = Path(data_dir).expanduser() / "MNIST"
        self.download, self.base_url = download, base_url

    def prepare_data(self) -> None:
        """Fetch and unpack what is not there yet; safe to run in several processes and to kill."""
        prepare(self.folder, "mnist", self.download, self.base_url)

    def load_tasks(self) -> tuple[DataSpec, dict[str, dict[str, Batch]]]:
        """Return the description and the splits; both copies are views of the same rows."""
        images, labels = read(self.folder, "train")
        test_images, test_labels = read(self.folder, "t10k")
        val = len(images) // VALIDATION
        require(val >= 1, f"{self.folder}: {len(images)} images are too few for training and validation")
        limits = dict(zip(SPLITS, self.rows or [None] * 3, strict=True))
        tasks: dict[str, dict[str, Batch]] = {split: {} for split in SPLITS}
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.seed))
        images, labels = images[order], labels[order]
        for name in ("mnist", "rotated"):
            if name == "rotated":
                images, test_images = clockwise(images), clockwise(test_images)
            parts = {
                "train": (images[val:], labels[val:]),
                "val": (images[:val], labels[:val]),
                "test": (test_images, test_labels),
            }
            for task in (f"{name}_1", f"{name}_2"):
                for split, (pixels, digits) in parts.items():
                    limit = limits[split]
                    tasks[split][task] = Batch({"image": pixels[:limit, None]}, {task: digits[:limit]})
        mean, std = pixel_statistics(tasks["train"]["mnist_1"].inputs["image"])  # a rotation changes nothing
        specs = [TaskSpec(task, "multiclass", CLASSES) for task in tasks["train"]]
        return DataSpec({"image": Image(1, SIDE, SIDE, mean, std)}, specs), tasks


def clockwise(images: Tensor) -> Tensor:
    """Return ``images [N, H, W]`` rotated by 90 degrees clockwise, ``[N, W, H]``."""
    return torch.rot90(images, k=-1, dims=(-2, -1)).contiguous()
