"""Jester from small made-up files in the published layout: parsing, splitting, preparing."""

from __future__ import annotations

import gzip
import hashlib
import logging
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules import jester
from mtl.data_modules.jester import JesterDataModule
from torch import Tensor

from mtl.checks import InputError
from mtl.types import Categorical, TaskSpec
from tests.file_server import serving

JOKES = 100
Make = Callable[..., JesterDataModule]


def make_ratings(users: int, seed: int = 0) -> Tensor:
    """Return ratings ``[users, 100]`` in hundredths; a third of them are 9900, not rated."""
    generator = torch.Generator().manual_seed(seed)
    ratings = torch.randint(-1000, 1001, (users, JOKES), generator=generator)
    return ratings.masked_fill(torch.rand(users, JOKES, generator=generator) < 1 / 3, 9900)


def lines_of(ratings: Tensor) -> list[str]:
    return [
        ",".join([str(sum(value != 9900 for value in row)), *(f"{value / 100:.2f}" for value in row)])
        for row in ratings.tolist()
    ]


def write(file: Path, lines: list[str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    raw = "".join(line + "\n" for line in lines).encode("latin-1")
    file.write_bytes(gzip.compress(raw, mtime=0) if file.suffix == ".gz" else raw)
    return file


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Build a data module over ``tmp_path``."""

    def build(**kwargs: Any) -> JesterDataModule:
        return JesterDataModule(**{"data_dir": str(tmp_path), "batch_size": 64, "download": False} | kwargs)

    return build


@pytest.fixture
def ready(make: Make) -> Make:
    """Build, prepare and set up a data module over the files in ``tmp_path``."""

    def build(**kwargs: Any) -> JesterDataModule:
        data = make(**kwargs)
        data.prepare_data()
        data.setup()
        return data

    return build


def matrix(data: JesterDataModule) -> Tensor:
    """Return the ratings of all splits as ``[users, 100]``, in hundredths; -1 marks a pair that is in no split."""
    whole = torch.full((data.spec.inputs["user"].size, JOKES), -1)
    for rows in data.splits.values():
        ratings = (rows.targets["rating"] * 100).round()
        assert torch.equal(rows.targets["rated"] == 0, ratings.isnan())
        whole[rows.inputs["user"], rows.inputs["joke"]] = ratings.nan_to_num(9900).long()
    return whole


@pytest.mark.parametrize("name", ["jester-data-x.csv", "jester-data-x.csv.gz"])
def test_every_pair_is_in_one_split(tmp_path: Path, ready: Make, name: str) -> None:
    ratings = make_ratings(30)
    ratings[0, :3] = torch.tensor([-1000, 1000, 0])
    ratings[4] = 9900  # a user without ratings
    write(tmp_path / "jester" / name, lines_of(ratings))
    data = ready(alpha=0.75)
    assert torch.equal(matrix(data), ratings)
    assert [len(rows) for rows in data.splits.values()] == [2100, 450, 450]
    assert data.spec.inputs == {"user": Categorical(30), "joke": Categorical(JOKES)}
    assert data.spec.tasks == [
        TaskSpec("rated", "binary", weight=0.75, classes=("no", "yes")),
        TaskSpec("rating", "regression", weight=0.25),
    ]
    assert data.splits["val"].targets["rating"].dtype == torch.float32


def test_split_is_stratified_and_depends_on_the_seed_only(tmp_path: Path, ready: Make) -> None:
    write(tmp_path / "jester" / "jester-data-x.csv", lines_of(make_ratings(30)))
    first, again, other = ready(seed=1), ready(seed=1), ready(seed=2)
    rated = sum(float(rows.targets["rated"].sum()) for rows in first.splits.values())
    for name, share in zip(("train", "val", "test"), (0.7, 0.15, 0.15), strict=True):
        assert abs(float(first.splits[name].targets["rated"].sum()) - share * rated) <= 1
        assert torch.equal(first.splits[name].inputs["user"], again.splits[name].inputs["user"])
        assert not torch.equal(first.splits[name].inputs["user"], other.splits[name].inputs["user"])


def test_files_are_read_by_name_and_csv_is_preferred(tmp_path: Path, ready: Make) -> None:
    one, two, three = (make_ratings(5, seed) for seed in range(3))
    folder = tmp_path / "jester"
    write(folder / "jester-data-c.csv", lines_of(three))
    write(folder / "jester-data-a.csv.gz", lines_of(one))
    write(folder / "jester-data-b.csv", lines_of(two))
    write(folder / "jester-data-b.csv.gz", ["not read"])
    write(folder / "jester-data-a.xls", ["not read"])
    write(folder / "user_ids.csv", ["not read"])
    assert torch.equal(matrix(ready()), torch.cat([one, two, three]))
    write(folder / "jester-data-d.csv", lines_of(one))  # the cache of the other files is not used
    assert torch.equal(matrix(ready()), torch.cat([one, two, three, one]))


def test_excel_file(tmp_path: Path, ready: Make) -> None:
    xlwt = pytest.importorskip("xlwt")
    ratings, book = make_ratings(6), xlwt.Workbook()
    sheet = book.add_sheet("jester")
    for row, line in enumerate(lines_of(ratings)):
        for column, text in enumerate(line.split(",")):
            sheet.write(row, column, float(text))
    (tmp_path / "jester").mkdir()
    file = tmp_path / "jester" / "jester-data-1.xls"
    book.save(str(file))
    assert torch.equal(matrix(ready()), ratings)
    sheet.write(7, 3, "words")
    book.save(str(file))
    with pytest.raises(
        InputError, match=r"jester-data-1\.xls, line 7: .* is damaged, like 2 of 8 lines\. Expected 101"
    ):
        ready()


def test_invalid_excel_file_and_missing_reader(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "jester" / "jester-data-1.xls", ["<html>"])
    with pytest.raises(InputError, match=r"jester-data-1\.xls is not a readable xls file \(.*\)\. Repair"):
        make().prepare_data()

    def read_excel(*args: Any, **kwargs: Any) -> None:
        raise ModuleNotFoundError("required package 'fastexcel' not found")

    monkeypatch.setattr(pl, "read_excel", read_excel)
    with pytest.raises(InputError, match=rf"{file}: pip install fastexcel to read it, or save .*jester-data-1\.csv"):
        make().prepare_data()


def change(lines: list[str], row: int, columns: dict[int, str]) -> list[str]:
    """Replace fields of a row; rows and columns count from 1."""
    fields = lines[row - 1].split(",")
    for column, text in columns.items():
        fields[column - 1] = text
    return [*lines[: row - 1], ",".join(fields), *lines[row:]]


DAMAGE = {  # what it does, and the number of the first damaged line
    "too few columns": (lambda lines: [*lines[:6], "1,2", *lines[7:]], 7),
    "too many columns": (lambda lines: [*lines[:8], lines[8] + ",1"], 9),
    "empty line": (lambda lines: [*lines[:6], "", *lines[6:]], 7),
    "text": (lambda lines: change(lines, 3, {5: "fun"}), 3),
    "empty field": (lambda lines: change(lines, 1, {101: ""}), 1),
    "nan": (lambda lines: change(lines, 2, {4: "nan"}), 2),
    "infinite": (lambda lines: change(lines, 2, {4: "inf"}), 2),
    "too high": (lambda lines: change(lines, 9, {2: "10.01"}), 9),
    "too low": (lambda lines: change(lines, 9, {2: "-98"}), 9),
    "count": (lambda lines: change(lines, 4, {1: "7"}), 4),
    "99 jokes": (lambda lines: change(lines, 4, {1: "99"}), 4),
    "header": (lambda lines: change(lines, 1, {1: "count"}), 1),
}


@pytest.mark.parametrize(("damage", "number"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_line_is_named(tmp_path: Path, make: Make, damage: Callable, number: int) -> None:
    lines = damage(lines_of(make_ratings(9)))
    file = write(tmp_path / "jester" / "jester-data-x.csv", lines)
    with pytest.raises(InputError) as caught:
        make().prepare_data()
    assert str(caught.value).startswith(f"{file}, line {number}: {lines[number - 1][:60]!r}"[:-1])
    assert f"is damaged, like 1 of {len(lines)} lines. Expected 101 columns without a header" in str(caught.value)
    assert str(caught.value).endswith(f"Repair the file, or delete the folder {file.parent} to have it fetched again")


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve three archives of made-up parts (4, 5 and 6 users, as text) and make their checksums the expected ones."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    for number, (name, part) in enumerate(jester.PARTS.items()):
        with zipfile.ZipFile(folder / part.archive, "w") as archive:
            archive.writestr(f"{name}.xls", "\n".join(lines_of(make_ratings(4 + number, number))))
        sha256 = hashlib.sha256((folder / part.archive).read_bytes()).hexdigest()
        monkeypatch.setitem(jester.PARTS, name, replace(part, sha256=sha256, users=4 + number))
    monkeypatch.setattr(jester, "_read_excel", jester.read_lines)
    with serving(folder) as url:
        yield url


def test_download_unpack_parse(ready: Make, mirror: str, caplog: pytest.LogCaptureFixture) -> None:
    data = ready(download=True, base_url=mirror)
    assert torch.equal(matrix(data), torch.cat([make_ratings(4 + number, number) for number in range(3)]))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_only_missing_parts_are_fetched(tmp_path: Path, ready: Make, mirror: str, caplog: Any) -> None:
    mine = make_ratings(7, seed=9)
    write(tmp_path / "jester" / "jester-data-2.csv", lines_of(mine))
    assert torch.equal(matrix(ready()), mine)  # without download, only existing files are read
    assert "jester-data-2.csv has 7 users, the published file 5" in caplog.text
    data = ready(download=True, base_url=mirror)
    assert torch.equal(matrix(data), torch.cat([make_ratings(4), mine, make_ratings(6, 2)]))


def test_file_of_another_name_prevents_fetching(tmp_path: Path, ready: Make) -> None:
    mine = make_ratings(7)
    write(tmp_path / "jester" / "jester-data-mine.csv", lines_of(mine))
    assert torch.equal(matrix(ready(download=True, base_url="http://127.0.0.1:9")), mine)
