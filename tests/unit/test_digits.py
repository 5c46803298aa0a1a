"""MNIST and SVHN as one task: reading, splitting, messages about damaged files."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from mtl.data_modules import digits
from mtl.data_modules.digits import DigitsDataModule, resplit, to_colour
from mtl.data_modules.files import mnist, svhn
from scipy.io import savemat
from torch import Tensor

from mtl.checks import InputError
from mtl.types import Batch
from tests.digit_files import write_digits
from tests.svhn_files import write_svhn

SIZES = {"train": 40, "extra": 30, "test": 20}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_digits(folder / "MNIST" / "raw")
    write_svhn(folder / "SVHN", SIZES)
    return folder


def module(root: Path, **options: object) -> DigitsDataModule:
    data = DigitsDataModule(str(root), **{"batch_size": 50, "download": False} | options)
    data.prepare_data()
    data.setup()
    return data


def numbers(rows: Batch) -> tuple[Tensor, Tensor]:
    """Return the numbers of MNIST's and of SVHN's images; each image encodes its number in its last pixels."""
    image = rows.inputs["image"].long()
    grey = (image[:, :, :2] == 0).all((1, 2, 3))  # the border
    mnist, svhn = image[grey], image[~grey]
    return mnist[:, 0, 29, 29] + 250 * mnist[:, 0, 29, 28], svhn[:, 0, 31, 31] + 250 * svhn[:, 0, 31, 30]


def test_mnist_images_get_border_and_channels() -> None:
    images = torch.randint(256, (3, 28, 28), dtype=torch.uint8)
    colour = to_colour(images)
    assert colour.shape == (3, 3, 32, 32)
    for channel in range(3):
        assert torch.equal(colour[:, channel, 2:30, 2:30], images)
    assert int(colour.sum(dtype=torch.int64)) == 3 * int(images.sum(dtype=torch.int64))


def test_svhn_images_are_read_unchanged(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    pixels, labels = random.integers(256, size=(32, 32, 3, 12), dtype=np.uint8), np.array([10, 9, *range(1, 11)])
    savemat(tmp_path / "train_32x32.mat", {"X": pixels, "y": labels.astype(np.uint8)[:, None]})
    image, digit = svhn.read(tmp_path, "train", tmp_path / "cache")
    assert digit.tolist() == [0, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert (image.dtype, digit.dtype) == (torch.uint8, torch.int64)
    assert image.is_contiguous()
    for n, channel, y, x in [(0, 0, 0, 0), (11, 2, 31, 30), (5, 1, 3, 17)]:
        assert int(image[n, channel, y, x]) == pixels[y, x, channel, n]


def test_sizes_and_disjoint_splits(root: Path) -> None:
    splits = module(root).splits
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 114 + 68, "val": 23 + 11, "test": 23 + 11}
    for source, count in ((0, 160), (1, 90)):
        found = torch.cat([numbers(rows)[source] for rows in splits.values()])
        assert torch.equal(found.sort().values, torch.arange(count))
        assert not torch.equal(found, torch.arange(count))  # split at random


def test_labels_stay_with_their_images(root: Path) -> None:
    raw = root / "MNIST" / "raw"
    mnist = b"".join((raw / f"{part}-labels-idx1-ubyte").read_bytes()[8:] for part in ("train", "t10k"))
    for rows in module(root).splits.values():
        grey, colour = numbers(rows)
        assert rows.targets["digit"].tolist() == [mnist[n] for n in grey] + ((1 + colour) % 10).tolist()


def test_published_sizes() -> None:
    for published, total in ((digits.MNIST_ROWS, 70_000), (digits.SVHN_ROWS, 630_420)):
        parts = resplit("x", total, published, torch.Generator().manual_seed(0))
        assert tuple(map(len, parts)) == published
        assert len(torch.cat(parts).unique()) == total


def test_selected_parts_and_unpublished_sizes(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = module(root, svhn_parts=["train"])
    assert sum(len(numbers(rows)[1]) for rows in data.splits.values()) == 40
    assert "MNIST: 160 images instead of the published 70000; split in the published proportions" in caplog.text
    assert "SVHN (train): 40 images instead of the published 630420" in caplog.text


def test_files_are_parsed_once(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_svhn(tmp_path, {"train": 12})
    cache, parsed = tmp_path / "cache", []
    real = svhn.parse
    monkeypatch.setattr(svhn, "parse", lambda file: parsed.append(file) or real(file))
    first, again = (svhn.read(tmp_path, "train", cache) for _ in range(2))
    assert len(parsed) == 1
    assert torch.equal(first[0], again[0])
    write_svhn(tmp_path, {"train": 15})
    assert len(svhn.read(tmp_path, "train", cache)[0]) == 15  # the file has changed
    assert len(parsed) == 2


@pytest.mark.parametrize("source", [mnist, svhn])
def test_only_one_of_two_programs_fetches_a_file(
    tmp_path: Path, source: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_digits(tmp_path / "server", compressed=True)
    fetched: list[str] = []

    def fetch(url: str, dest: Path, *more: object, **options: object) -> None:
        fetched.append(dest.name)
        archive = tmp_path / "server" / dest.name
        dest.write_bytes(archive.read_bytes() if archive.exists() else b"")

    monkeypatch.setattr(source, "fetch", fetch)
    part, both = "mnist" if source is mnist else "train", threading.Barrier(2)

    def prepare() -> None:
        both.wait()
        source.prepare(tmp_path / "data", part, True)

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == len(set(fetched)) == (4 if source is mnist else 1)


GOOD = {"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.ones((4, 1), np.uint8)}
DAMAGE = {
    "grey": (
        {"X": np.zeros((32, 32, 1, 4), np.uint8)},
        r"contains X \[32, 32, 1, 4\] of uint8 and y \[4, 1\]: exp",
    ),
    "order": ({"X": np.zeros((4, 32, 32, 3), np.uint8)}, r"contains X \[4, 32, 32, 3\]"),
    "floats": ({"X": np.zeros((32, 32, 3, 4))}, "of float64"),
    "no images": ({"X": np.zeros((32, 32, 3, 0), np.uint8), "y": np.zeros((0, 1))}, r"X \[32, 32, 3, 0\]"),
    "fewer labels": ({"y": np.ones((3, 1), np.uint8)}, r"y \[3, 1\]"),
    "label 0": ({"y": np.zeros((4, 1), np.uint8)}, r"in 1\.\.10; delete it and start again"),
    "label 11": ({"y": np.full((4, 1), 11, np.uint8)}, r"in 1\.\.10"),
    "other names": ({"X": None}, "is damaged .*'X'"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_wrong_content(tmp_path: Path, change: Mapping[str, object], message: str) -> None:
    file = tmp_path / "train_32x32.mat"
    savemat(file, {name: value for name, value in (GOOD | dict(change)).items() if value is not None})
    with pytest.raises(InputError, match=rf"{re.escape(str(file))} .*{message}"):
        svhn.parse(file)


def test_too_few_images() -> None:
    with pytest.raises(InputError, match="SVHN: 3 images are too few for train, val and test"):
        resplit("SVHN", 3, digits.SVHN_ROWS, torch.Generator())
