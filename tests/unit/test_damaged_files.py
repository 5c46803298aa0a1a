"""Published files cut short, garbled or replaced: reading them works or gives one sentence, never a traceback."""

from __future__ import annotations

import gzip
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mtl.data_modules.base import TensorDataModule
from mtl.data_modules.books import BooksDataModule
from mtl.data_modules.celeba import CelebADataModule
from mtl.data_modules.digits import DigitsDataModule
from mtl.data_modules.files import svhn
from mtl.data_modules.files.mnist import IMAGES, LABELS, read, read_idx
from mtl.data_modules.jester import JesterDataModule
from mtl.data_modules.movielens import MovieLensDataModule
from mtl.data_modules.multi_mnist import MultiMNISTDataModule
from mtl.data_modules.omniglot import OmniglotDataModule
from scipy.io import savemat

from mtl.checks import InputError
from tests.tiny_data import write_tiny_data


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_data(tmp_path_factory.mktemp("tiny"))


OFFLINE = {"batch_size": 8, "download": False}
CASES: dict[str, Callable[[str], TensorDataModule]] = {  # one file of each kind, and what reads it
    "ml-1m/ratings.dat": lambda root: MovieLensDataModule(root, negatives="per_user", **OFFLINE),
    "bookcrossing/BX-Book-Ratings.csv": lambda root: BooksDataModule(root, min_records=1, **OFFLINE),
    "jester/jester-data-tiny.csv": lambda root: JesterDataModule(root, **OFFLINE),
    "MNIST/raw/train-images-idx3-ubyte": lambda root: MultiMNISTDataModule(root, rows=[9, 9, 9], **OFFLINE),
    "MNIST/raw/t10k-labels-idx1-ubyte": lambda root: MultiMNISTDataModule(root, rows=[9, 9, 9], **OFFLINE),
    "SVHN/test_32x32.mat": lambda root: DigitsDataModule(root, svhn_parts=["test"], **OFFLINE),
    "celeba/list_attr_celeba.txt": lambda root: CelebADataModule(root, ["Young"], workers=0, scale=8, **OFFLINE),
    "celeba/list_eval_partition.txt": lambda root: CelebADataModule(root, ["Young"], workers=0, scale=8, **OFFLINE),
    "celeba/img_align_celeba/000003.jpg": lambda root: CelebADataModule(root, ["Young"], workers=0, scale=8, **OFFLINE),
    "omniglot-py/images_background/Gujarati/character01/0001_01.png": lambda root: OmniglotDataModule(
        root, alphabets=["Gujarati"], side=14, **OFFLINE
    ),
}


def damages(content: bytes) -> list[bytes]:
    """Return some thirty damaged versions of a file."""
    chance = random.Random(0)
    found = [
        b"",
        b"\0",
        b"\xff" * 50,
        b"\n" * 5,
        b"<html></html>",
        content + b"more",
        content * 2,
        content[1:],
    ]
    found += [content[: len(content) * part // 8] for part in range(1, 8)]
    for _ in range(8):
        index = min(int(len(content) * chance.random() ** 4), len(content) - 1)  # headers more often than the rest
        found.append(content[:index] + bytes([chance.randrange(256)]) + content[index + 1 :])
        found.append(content[:index] + b"9" * 30 + content[index:])
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_damage_is_read_or_refused_by_one_sentence(tiny: Path, tmp_path: Path, name: str) -> None:
    top = name.split("/")[0]
    shutil.copytree(tiny / top, tmp_path / top)
    if top == "SVHN":
        shutil.copytree(tiny / "MNIST", tmp_path / "MNIST")
    file, messages = tmp_path / name, []
    for content in damages(file.read_bytes()):
        file.write_bytes(content)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        data = CASES[name](str(tmp_path))
        try:
            data.prepare_data()
            data.setup()
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 5
    assert [message for message in messages if not message.isprintable() or len(message) > 2000] == []


@pytest.mark.parametrize("name", CASES)
def test_folder_and_pipe_in_place_of_a_file_are_refused(tiny: Path, tmp_path: Path, name: str) -> None:
    top = name.split("/")[0]
    shutil.copytree(tiny / top, tmp_path / top)
    if top == "SVHN":
        shutil.copytree(tiny / "MNIST", tmp_path / "MNIST")
    file = tmp_path / name
    file.unlink()
    replacements = [file.mkdir, file.rmdir, lambda: os.mkfifo(file), file.unlink, lambda: file.symlink_to("nowhere")]
    for replace in replacements:
        replace()
        data = CASES[name](str(tmp_path))

        def read_all(data: TensorDataModule = data) -> None:
            data.prepare_data()
            data.setup()

        if file.is_symlink() or file.exists():
            with pytest.raises(InputError):
                read_all()


def idx(magic: int, sizes: list[int], body: bytes) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + body


@pytest.mark.parametrize(
    "content",
    [
        idx(IMAGES, [2, 14, 56], bytes(2 * 28 * 28)),  # other sizes of the same product
        idx(IMAGES, [2, 28, 28], bytes(28 * 28)),  # fewer images than stated
        idx(IMAGES, [1, 28, 28], bytes(2 * 28 * 28)),  # more images than stated
        idx(IMAGES, [0, 28, 28], b""),
        idx(IMAGES, [2**32 - 1, 28, 28], bytes(28 * 28)),
        idx(LABELS, [2], bytes(2)),
        b"\0\0\10\3",
        b"",
    ],
)
def test_images_of_other_sizes_and_wrong_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "images"
    file.write_bytes(content)
    message = rf"images is damaged: it has {len(content)} bytes and begins with .*expected 2051, .*28 x 28 pixels"
    with pytest.raises(InputError, match=message):
        read_idx(file, IMAGES, (28, 28))


def test_images_and_labels_are_read_as_written(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    pixels = bytes(range(196)) * 8
    (raw / "train-images-idx3-ubyte").write_bytes(idx(IMAGES, [2, 28, 28], pixels))
    (raw / "train-labels-idx1-ubyte").write_bytes(idx(LABELS, [2], bytes([3, 9])))
    images, labels = read(tmp_path, "train")
    assert torch.equal(images.flatten(), torch.tensor(list(pixels), dtype=torch.uint8))
    assert labels.tolist() == [3, 9]
    (raw / "train-labels-idx1-ubyte").write_bytes(idx(LABELS, [2], bytes([3, 10])))
    with pytest.raises(InputError, match=r"expected a label in 0\.\.9 for each image"):
        read(tmp_path, "train")


@pytest.mark.parametrize("labels", [["a", "b"], [1.5, 2.0], [np.nan, 1.0], [1 + 2j, 1]])
def test_labels_of_svhn_of_another_type_are_refused(tmp_path: Path, labels: list[object]) -> None:
    file = tmp_path / "train_32x32.mat"
    savemat(file, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array(labels)[:, None]})
    with pytest.raises(InputError, match=r"expected X \[32, 32, 3, N\] of uint8 and y \[N, 1\] in 1\.\.10"):
        svhn.parse(file)


def test_unpacked_table_of_jokes_that_is_too_large_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtl.data_modules.jester.MAX_BYTES", 5000)
    (tmp_path / "jester").mkdir()
    (tmp_path / "jester" / "jester-data-x.csv.gz").write_bytes(gzip.compress(bytes(100_000)))
    with pytest.raises(InputError, match=r"jester-data-x\.csv\.gz unpacks to more than 5000 bytes"):
        JesterDataModule(str(tmp_path), **OFFLINE).prepare_data()
