"""CelebA: reading images and attributes, the splits, messages about damaged and missing files."""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mtl.data_modules import celeba
from mtl.data_modules.celeba import CelebADataModule
from torchvision.datasets import CelebA

from mtl.checks import InputError
from tests.celeba_files import colour, marks, picture, write_celeba
from tests.loaded import loaded

SIZES = (10, 4, 3)
OWNERS = {
    "train": [0, 3, 6, 9, 11, 12, 13, 14, 15, 16],
    "val": [1, 4, 7, 10],
    "test": [2, 5, 8],
}  # numbers of the images
ATTRIBUTES = ["Smiling", "Bald", "Young"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_celeba(folder / "celeba", SIZES)
    return folder


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the written files, to be damaged."""
    shutil.copytree(written, tmp_path / "data")
    return tmp_path / "data"


def module(root: Path, **options: object) -> CelebADataModule:
    common = {"batch_size": 4, "attributes": ATTRIBUTES, "download": False}
    return loaded(CelebADataModule(str(root), **common | options))


@pytest.mark.parametrize(("scale", "shape"), [(1, (218, 178)), (8, (28, 23))])
def test_each_image_is_in_its_split(
    root: Path, scale: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(celeba, "IMAGES_PER_CHUNK", 3)  # images of several threads
    data = module(root, scale=scale)
    for name, rows in data.splits.items():
        images = rows.inputs["image"]
        assert (images.dtype, tuple(images.shape)) == (torch.uint8, (len(OWNERS[name]), 3, *shape))
        expected = torch.tensor([colour(number) for number in OWNERS[name]], dtype=torch.float32)
        assert (images.float().mean((2, 3)) - expected).abs().max() < 2.0
        assert bool((images[:, :, -5:].float().mean((1, 2, 3)) > images[:, :, :5].float().mean((1, 2, 3)) + 20).all())
        assert bool((images[..., -5:].float().mean((1, 2, 3)) > images[..., :5].float().mean((1, 2, 3)) + 20).all())


def test_attributes_belong_to_their_images(root: Path) -> None:
    data = module(root)
    for name, rows in data.splits.items():
        for attribute in ATTRIBUTES:
            column = celeba.ATTRIBUTES.index(attribute)
            assert rows.targets[attribute].tolist() == [float(marks(number)[column]) for number in OWNERS[name]]
    assert list(rows.targets) == ATTRIBUTES


def test_missing_and_damaged_images(root: Path) -> None:
    images = root / "celeba" / "img_align_celeba"
    good = (images / "000005.jpg").read_bytes()
    (images / "000005.jpg").write_bytes(good[: len(good) // 2])
    with pytest.raises(
        InputError, match=r"/000005\.jpg is damaged \(.*\). Delete \S*img_align_celeba and start again, with"
    ):
        module(root)
    picture(4, height=100).save(images / "000005.jpg")
    with pytest.raises(InputError, match=r"/000005\.jpg is damaged .*100 x 178 pixels instead of 218 x 178"):
        module(root)
    (images / "000005.jpg").unlink()
    with pytest.raises(InputError, match=r"/000005\.jpg: no such file"):
        module(root)
    (images / "000005.jpg").write_bytes(good)
    assert len(module(root).splits["train"]) == 10  # the repaired file is read


def test_grey_images(root: Path) -> None:
    picture(1).convert("L").save(root / "celeba" / "img_align_celeba" / "000002.jpg", format="JPEG")
    grey = module(root).splits["val"].inputs["image"][0]
    assert torch.equal(grey[0], grey[2])


def test_lists_that_do_not_fit(root: Path) -> None:
    attributes, partition = (root / "celeba" / name for name in ("list_attr_celeba.txt", "list_eval_partition.txt"))
    lines = attributes.read_text()
    attributes.write_text(lines.replace("000004.jpg", "000009.jpg"))
    with pytest.raises(
        InputError, match=r"list_attr_celeba\.txt is damaged .*other attributes or images than list_eval"
    ):
        module(root)
    attributes.write_text(lines)
    partition.write_text(partition.read_text().replace("jpg 2", "jpg 1"))
    with pytest.raises(InputError, match=r"list_eval_partition\.txt must have images of 0, 1 and 2"):
        module(root)


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that replaces Google Drive; the checksums of its files are the expected ones."""
    folder = tmp_path / "drive"
    write_celeba(folder, SIZES, archived=True)
    names = {identity: name for identity, _, name in CelebA.file_list}

    def download(id: str, output: str, **options: object) -> None:
        shutil.copy(folder / names[id], output)

    monkeypatch.setitem(sys.modules, "gdown", SimpleNamespace(download=download))
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    official = [(identity, sums.get(name, md5), name) for identity, md5, name in CelebA.file_list]
    monkeypatch.setattr(CelebA, "file_list", official)
    return folder


def test_download(tmp_path: Path, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, content = tmp_path / "celeba", (drive / "img_align_celeba.zip").read_bytes()
    (drive / "img_align_celeba.zip").write_text("<html>Quota exceeded</html>")
    with pytest.raises(InputError, match=r"cannot download img_align_celeba\.zip from Google Drive: .*corrupted"):
        module(tmp_path, download=True)
    assert not list(folder.glob("img_align_celeba*"))
    assert (folder / "list_attr_celeba.txt").is_file()  # complete files are kept
    with zipfile.ZipFile(folder / "img_align_celeba.zip", "w") as other:
        other.writestr("other.txt", "")
    with pytest.raises(InputError, match=r"img_align_celeba\.zip contains no folder img_align_celeba: get .* https"):
        module(tmp_path)
    (folder / "img_align_celeba.zip").unlink()
    (drive / "img_align_celeba.zip").write_bytes(content)
    assert [len(rows) for rows in module(tmp_path, download=True).splits.values()] == list(SIZES)
    assert len(list((folder / "img_align_celeba").iterdir())) == sum(SIZES)
    shutil.rmtree(drive)
    module(tmp_path, download=True)  # nothing is fetched twice
    with pytest.raises(InputError, match=r"cannot download list_attr_celeba\.txt from Google Drive: .*No such file"):
        module(tmp_path / "new", download=True)
    monkeypatch.setitem(sys.modules, "gdown", None)
    with pytest.raises(InputError, match=r"'gdown' is required.*; get .* and put them into"):
        module(tmp_path / "new", download=True)
