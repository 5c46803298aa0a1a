"""Omniglot: reading, splitting, fetching, messages about missing and damaged files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mtl.data_modules.omniglot import OmniglotDataModule, reduce_images, split_drawings
from PIL import Image as Pillow
from torchvision.datasets import Omniglot

from mtl.checks import InputError
from mtl.types import Batch
from tests.loaded import loaded
from tests.omniglot_files import drawing, number, write_archive, write_omniglot

SIZES = {"Greek": 3, "Latin": 2}
ALL = {
    (alphabet, character, drawer) for alphabet in (0, 1) for character in range(3 - alphabet) for drawer in range(20)
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_omniglot(folder / "omniglot-py" / "images_background", {"Greek": 3})
    write_omniglot(folder / "omniglot-py" / "images_evaluation", {"Latin": 2}, first=1)
    return folder


def module(root: Path, **options: Any) -> OmniglotDataModule:
    common = {"alphabets": list(SIZES), "batch_size": 16, "eval_batch_size": 64, "download": False}
    return loaded(OmniglotDataModule(str(root), **common | options))


def numbers(rows: Batch) -> list[tuple[int, int, int]]:
    return [number(image) for image in rows.inputs["image"][:, 0].numpy()]


def test_each_character_is_split_into_10_4_6_drawings(root: Path) -> None:
    seen = []
    for split, count in (("train", 10), ("val", 4), ("test", 6)):
        for index, (task, characters) in enumerate(SIZES.items()):
            rows = module(root).tasks[split][task]
            found = numbers(rows)
            assert list(rows.targets) == [task]
            assert {alphabet for alphabet, _, _ in found} == {index}
            assert [character for _, character, _ in found] == rows.targets[task].tolist()
            assert rows.targets[task].bincount().tolist() == [count] * characters
            seen += found
            alphabet, character, drawer = found[0]
            assert torch.equal(rows.inputs["image"][0, 0], 255 - torch.from_numpy(drawing(character, drawer, alphabet)))
    assert len(seen) == len(ALL) == 100
    assert set(seen) == ALL


def test_split_depends_on_the_alphabet_alone(root: Path) -> None:
    one, again = (module(root, alphabets=names).tasks["test"]["Latin"] for names in (["Latin"], ["Greek", "Latin"]))
    assert numbers(one) == numbers(again)
    characters = [[d for _, c, d in numbers(one) if c == character] for character in range(2)]
    assert characters[0] != characters[1]  # each character has its own split


@pytest.mark.parametrize("side", [1, 28, 35])
def test_resized_pixels_are_area_means(side: int) -> None:
    images = torch.randint(256, (3, 105, 105), dtype=torch.uint8)
    small = reduce_images(images, side)
    assert (small.shape, small.dtype) == ((3, side, side), torch.uint8)
    assert (reduce_images(torch.full((1, 105, 105), 255, dtype=torch.uint8), side) == 255).all()
    fine = images.double().repeat_interleave(side, 1).repeat_interleave(side, 2)  # side x 105 is a multiple of both
    exact = fine.reshape(3, side, 105, side, 105).mean((2, 4))
    assert float((small - exact).abs().max()) <= 0.5 + 1e-3


def test_unusual_numbers_of_drawings(tmp_path: Path) -> None:
    background = tmp_path / "omniglot-py" / "images_background"
    write_omniglot(background, SIZES)
    for drawer in (3, 9, 20):
        (background / "Greek" / "character02" / f"0002_{drawer:02d}.png").unlink()
    (background / "Latin" / "character01" / "0004_01.png").unlink()
    data = module(tmp_path)
    assert [data.tasks[split]["Greek"].targets["Greek"].bincount()[1] for split in data.tasks] == [8, 4, 5]
    assert [data.tasks[split]["Latin"].targets["Latin"].bincount()[0] for split in data.tasks] == [10, 3, 6]
    with pytest.raises(InputError, match="Greek: the 3 drawings of a character leave none for val"):
        split_drawings("Greek", torch.tensor([0, 0, 0, 1, 1]), torch.Generator())


def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write both archives as on their site and make their checksums the expected ones."""
    sums = {"images_background": write_archive(folder, "images_background", {"Greek": 3, "Korean": 2})}
    sums["images_evaluation"] = write_archive(folder, "images_evaluation", {"Latin": 2, "Tibetan": 2}, first=1)
    monkeypatch.setattr(Omniglot, "zips_md5", sums)


def test_archives_downloaded_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(tmp_path / "server", monkeypatch)
    folder = tmp_path / "data" / "omniglot-py"
    folder.mkdir(parents=True)
    shutil.copy(tmp_path / "server" / "images_evaluation.zip", folder)
    assert len(module(tmp_path / "data", alphabets=["Latin"]).tasks["train"]) == 1  # the other archive is not needed
    with pytest.raises(InputError, match=r"omniglot-py has no Greek; choose among Latin, Tibetan"):
        module(tmp_path / "data")
    shutil.copy(folder / "images_evaluation.zip", folder / "images_background.zip")
    with pytest.raises(InputError, match=r"images_background\.zip contains no images_background"):
        module(tmp_path / "data")
    shutil.copy(tmp_path / "server" / "images_background.zip", folder)
    assert [task.num_classes for task in module(tmp_path / "data").spec.tasks] == [3, 2]
    with pytest.raises(InputError, match=r"data\.alphabets: .* has no Klingon; choose among Greek, Korean, Latin"):
        module(tmp_path / "data", alphabets=["Greek", "Klingon"])


def test_wrong_size_and_too_few_characters(tmp_path: Path) -> None:
    background = tmp_path / "omniglot-py" / "images_background"
    write_omniglot(background, SIZES | {"Korean": 1})
    Pillow.fromarray(np.zeros((104, 105), np.uint8)).save(background / "Greek" / "character02" / "0002_05.png")
    message = r"0002_05\.png is damaged .*104 x 105 pixels instead of 105 x 105.*\. Delete .*Greek and start again"
    with pytest.raises(InputError, match=message):
        module(tmp_path)
    with pytest.raises(InputError, match=r"Korean has 1 characters .*: it needs at least 2"):
        module(tmp_path, alphabets=["Korean"])
