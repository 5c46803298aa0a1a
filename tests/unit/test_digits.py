"""Digits: MNIST and SVHN as one task, two images on one canvas, and four copies of MNIST, two of them rotated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mtl.data_modules import digits
from mtl.data_modules.digits import DigitsDataModule, parse_svhn, split_images
from mtl.data_modules.files.images import pixel_scale
from mtl.data_modules.four_mnists import FourMNISTsDataModule
from mtl.data_modules.multi_mnist import MultiMNISTDataModule, compose_canvases
from scipy.io import savemat
from torch import Tensor

from mtl.checks import InputError
from mtl.types import Batch
from tests.digit_files import write_digits, write_svhn
from tests.loaded import loaded

SIZES = {"train": 40, "extra": 30, "test": 20}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_digits(folder / "MNIST" / "raw")
    write_svhn(folder / "SVHN", SIZES)
    return folder


def module(root: Path, **options: object) -> DigitsDataModule:
    return loaded(DigitsDataModule(str(root), **{"batch_size": 50, "download": False} | options))


def numbers(rows: Batch) -> tuple[Tensor, Tensor]:
    """Return the numbers of MNIST's and of SVHN's images; each image encodes its number in its last pixels."""
    image = rows.inputs["image"].long()
    grey = (image[:, :, :2] == 0).all((1, 2, 3))  # the border
    mnist, svhn = image[grey], image[~grey]
    return mnist[:, 0, 29, 29] + 250 * mnist[:, 0, 29, 28], svhn[:, 0, 31, 31] + 250 * svhn[:, 0, 31, 30]


def test_svhn_images_are_read_unchanged(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    pixels, labels = random.integers(256, size=(32, 32, 3, 12), dtype=np.uint8), np.array([10, 9, *range(1, 11)])
    savemat(tmp_path / "train_32x32.mat", {"X": pixels, "y": labels.astype(np.uint8)[:, None]})
    image, digit = parse_svhn(tmp_path / "train_32x32.mat").values()
    assert digit.tolist() == [0, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert (image.dtype, digit.dtype) == (torch.uint8, torch.int64)
    assert image.is_contiguous()
    for n, channel, y, x in [(0, 0, 0, 0), (11, 2, 31, 30), (5, 1, 3, 17)]:
        assert int(image[n, channel, y, x]) == pixels[y, x, channel, n]


def test_labels_stay_with_their_images(root: Path) -> None:
    raw = root / "MNIST" / "raw"
    mnist = b"".join((raw / f"{part}-labels-idx1-ubyte").read_bytes()[8:] for part in ("train", "t10k"))
    splits = module(root).splits
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 114 + 69, "val": 23 + 10, "test": 23 + 11}
    for rows in splits.values():
        grey, colour = numbers(rows)
        border = torch.ones(32, 32, dtype=torch.bool)
        border[2:30, 2:30] = False
        assert not rows.inputs["image"][: len(grey)][:, :, border].any()
        assert rows.targets["digit"].tolist() == [mnist[n] for n in grey] + ((1 + colour) % 10).tolist()


def test_published_sizes() -> None:
    for published, total in ((digits.MNIST_ROWS, 70_000), (digits.SVHN_ROWS, 630_420)):
        parts = split_images("x", total, published, torch.Generator().manual_seed(0))
        assert tuple(map(len, parts.values())) == published
        assert len(torch.cat([*parts.values()]).unique()) == total
    with pytest.raises(InputError, match="SVHN: 3 images leave none for test"):
        split_images("SVHN", 3, digits.SVHN_ROWS, torch.Generator())


# Two images on one canvas


def multi(root: Path, **options: object) -> MultiMNISTDataModule:
    return loaded(
        MultiMNISTDataModule(str(root), **{"rows": [300, 80, 90], "batch_size": 50, "eval_batch_size": 64} | options)
    )


def paired(batch: Batch) -> Tensor:
    """Return the numbers of the bottom right images, which their last pixels encode."""
    image = batch.inputs["image"][:, 0].long()
    return image[:, 35, 35] + 250 * image[:, 35, 34]


def test_composition_by_hand() -> None:
    images = torch.stack([torch.full((28, 28), value, dtype=torch.uint8) for value in (100, 200)])
    batch = compose_canvases(images, torch.tensor([3, 8]), torch.tensor([[0, 1], [1, 1]]))
    canvas = batch.inputs["image"][0, 0].long()
    assert canvas.shape == (36, 36)
    assert (canvas[:8, :28] == 100).all()
    assert (canvas[:28, :8] == 100).all()
    assert (canvas[8:28, 8:28] == 255).all()  # 100 + 200, clipped
    assert (canvas[28:, 8:] == 200).all()
    assert (canvas[8:, 28:] == 200).all()
    assert (canvas[:8, 28:] == 0).all()
    assert (canvas[28:, :8] == 0).all()
    assert batch.targets["top_left"].tolist() == [3, 8]
    assert batch.targets["bottom_right"].tolist() == [8, 8]


def test_splits_of_pairs_share_no_image(root: Path) -> None:
    data = multi(root, rows=[3000, 800, 900])
    used = {name: set(paired(rows).tolist()) for name, rows in data.splits.items()}
    assert not used["train"] & used["val"]
    assert not used["train"] & used["test"]
    assert not used["val"] & used["test"]
    assert used["train"] | used["val"] == set(range(120))
    assert used["test"] == set(range(120, 160))
    assert {name: len(rows) for name, rows in data.splits.items()} == {"train": 3000, "val": 800, "test": 900}


# Four MNISTs

TASKS = ["mnist_1", "mnist_2", "rotated_1", "rotated_2"]


def four(root: Path, **options: object) -> FourMNISTsDataModule:
    return loaded(
        FourMNISTsDataModule(str(root), **{"batch_size": 10, "eval_batch_size": 16, "download": False} | options)
    )


def rotated_numbers(task: str, rows: Batch) -> list[int]:
    """Return the image numbers; the last two pixels encode them, at the bottom right or, rotated, the bottom left."""
    image = rows.inputs["image"][:, 0].long()
    low, high = (
        (image[:, 27, 0], image[:, 26, 0]) if task.startswith("rotated") else (image[:, 27, 27], image[:, 27, 26])
    )
    return (low + 250 * high).tolist()


def test_rotated_images_and_labels_match_the_files(root: Path) -> None:
    raw = (root / "MNIST" / "raw" / "train-images-idx3-ubyte").read_bytes()[16:]
    labels = (root / "MNIST" / "raw" / "train-labels-idx1-ubyte").read_bytes()[8:]
    images = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(-1, 28, 28)
    for task, rows in four(root).tasks["train"].items():
        found = rotated_numbers(task, rows)
        expected = images[found]
        if task.startswith("rotated"):
            expected = expected.transpose(1, 2).flip(2)
        assert torch.equal(rows.inputs["image"][:, 0], expected)
        assert rows.targets[task].tolist() == [labels[number] for number in found]


def test_splits_of_each_copy(root: Path) -> None:
    tasks, few = four(root).tasks, four(root, rows=[30, 5, 1000]).tasks
    assert {split: list(rows) for split, rows in tasks.items()} == dict.fromkeys(("train", "val", "test"), TASKS)
    held_out = set()
    for task in TASKS:
        train, val, test = (rotated_numbers(task, tasks[split][task]) for split in ("train", "val", "test"))
        assert (len(train), len(val), len(test)) == (100, 20, 40)
        assert [len(few[split][task]) for split in ("train", "val", "test")] == [30, 5, 40]
        assert sorted(train + val) == list(range(120))
        assert test == list(range(120, 160))
        held_out.add(frozenset(val))
    assert len(held_out) == 1  # all tasks have the same validation images


def test_pixels_are_standardized_or_only_divided() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    mean = 0.4
    std = ((0.4**2 + 0.2**2 + 0.6**2) / 3) ** 0.5
    assert pixel_scale(pixels, True) == pytest.approx((mean, std))
    assert pixel_scale(pixels, False) == (0.0, 1.0)
