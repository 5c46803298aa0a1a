"""Four MNISTs: direction of the rotation, splits, shared memory, messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules.four_mnists import FourMNISTsDataModule, clockwise

from mtl.types import Batch
from tests.digit_files import write_digits

TASKS = ["mnist_1", "mnist_2", "rotated_1", "rotated_2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_digits(folder / "MNIST" / "raw")
    return folder


def module(root: Path, **options: Any) -> FourMNISTsDataModule:
    data = FourMNISTsDataModule(str(root), **{"batch_size": 10, "eval_batch_size": 16, "download": False} | options)
    data.prepare_data()
    data.setup()
    return data


def numbers(task: str, rows: Batch) -> list[int]:
    """Return the image numbers; the last two pixels encode them, at the bottom right or, rotated, the bottom left."""
    image = rows.inputs["image"][:, 0].long()
    low, high = (
        (image[:, 27, 0], image[:, 26, 0]) if task.startswith("rotated") else (image[:, 27, 27], image[:, 27, 26])
    )
    return (low + 250 * high).tolist()


def test_rotation_is_clockwise() -> None:
    corner = torch.tensor([[[1, 2, 3], [4, 5, 6]]])
    assert clockwise(corner).tolist() == [[[4, 1], [5, 2], [6, 3]]]  # the left column becomes the top row
    image = torch.zeros(1, 28, 28, dtype=torch.uint8)
    image[0, 0, 5] = 9  # on the top edge
    assert clockwise(image)[0, 5, 27] == 9  # on the right edge


def test_images_and_labels_match_the_files(root: Path) -> None:
    raw = (root / "MNIST" / "raw" / "train-images-idx3-ubyte").read_bytes()[16:]
    labels = (root / "MNIST" / "raw" / "train-labels-idx1-ubyte").read_bytes()[8:]
    images = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(-1, 28, 28)
    for task, rows in module(root).tasks["train"].items():
        found = numbers(task, rows)
        expected = images[found]
        if task.startswith("rotated"):
            expected = expected.transpose(1, 2).flip(2)
        assert torch.equal(rows.inputs["image"][:, 0], expected)
        assert rows.targets[task].tolist() == [labels[number] for number in found]


def test_splits_of_each_task(root: Path) -> None:
    tasks = module(root).tasks
    assert {split: list(rows) for split, rows in tasks.items()} == dict.fromkeys(("train", "val", "test"), TASKS)
    held_out = set()
    for task in TASKS:
        train, val, test = (numbers(task, tasks[split][task]) for split in ("train", "val", "test"))
        assert (len(train), len(val), len(test)) == (100, 20, 40)
        assert sorted(train + val) == list(range(120))
        assert test == list(range(120, 160))
        assert list(tasks["val"][task].targets) == [task]
        held_out.add(frozenset(val))
    assert len(held_out) == 1  # all tasks have the same validation images


def test_copies_are_shuffled_differently(root: Path) -> None:
    order: dict[str, list[int]] = {task: [] for task in TASKS}
    for batch in module(root).train_dataloader():
        [task] = batch.targets
        assert batch.inputs["image"].shape == (10, 1, 28, 28)
        order[task] += numbers(task, batch)
    assert all(len(found) == 100 for found in order.values())
    assert len({tuple(found[:10]) for found in order.values()}) == 4


def test_copies_share_memory(root: Path) -> None:
    tasks = module(root).tasks
    for kind in ("mnist", "rotated"):
        for split in ("train", "test"):
            one, two = (tasks[split][f"{kind}_{copy}"].inputs["image"].untyped_storage() for copy in (1, 2))
            assert one.data_ptr() == two.data_ptr()


def test_rows_limit_the_splits(root: Path) -> None:
    tasks, full = module(root, rows=[30, 5, 1000]).tasks, module(root).tasks
    for task in TASKS:
        assert [len(tasks[split][task]) for split in ("train", "val", "test")] == [30, 5, 40]
        assert torch.equal(tasks["train"][task].inputs["image"], full["train"][task].inputs["image"][:30])
