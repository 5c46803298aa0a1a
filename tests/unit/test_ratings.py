"""Ratings (MovieLens, Book-Crossing, Jester) from small made-up files: parsing, filtering, preparing, damage."""

from __future__ import annotations

import hashlib
import zipfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules import books, jester, movielens
from mtl.data_modules.books import HEADER, BooksDataModule, drop_rare_ids, read_records
from mtl.data_modules.jester import JesterDataModule
from mtl.data_modules.movielens import MovieLensDataModule
from torch import Tensor

from mtl.checks import InputError
from mtl.types import Batch, Categorical, TaskSpec
from tests.file_server import serving
from tests.loaded import loaded
from tests.programs import Forked
from tests.rating_files import JOKES, book_lines, book_records, joke_lines, joke_ratings, write

USERS, MOVIES, EACH = 40, 60, 20
RATINGS, BOOKS, JESTER = "ml-1m/ratings.dat", "bookcrossing/BX-Book-Ratings.csv", "jester/jester-data-x.csv"


def ready(kind: Any, root: Path, **options: Any) -> Any:
    """Build, prepare and set up a data module over the files in ``root``."""
    common = {"data_dir": str(root), "batch_size": 64, "download": False}
    return loaded(kind(**common | ({"min_records": 1} if kind is BooksDataModule else {}) | options))


def zipped(file: Path, members: dict[str, list[str]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, lines in members.items():
            archive.writestr(name, "\n".join(lines) + "\n")
    return file


def all_rows(data: Any) -> Batch:
    parts = [data.splits[name] for name in ("train", "val", "test")]
    return Batch(
        {name: torch.cat([part.inputs[name] for part in parts]) for name in parts[0].inputs},
        {name: torch.cat([part.targets[name] for part in parts]) for name in parts[0].targets},
    )


def triples(data: Any) -> list[tuple[int, int, int]]:
    """Return the sorted (user, item, rating or 0) of the seen pairs."""
    rows = all_rows(data)
    seen, rating = list(rows.targets.values())
    columns = *rows.inputs.values(), rating.nan_to_num().long()
    return sorted(zip(*(column[seen == 1].tolist() for column in columns), strict=True))


def movie_lines(separator: str = "::") -> list[str]:
    """Return the lines of 40 users who each rate 20 of the movies 1, 2, ..., 60 with 1 to 5."""
    generator = torch.Generator().manual_seed(1)
    lines = []
    for user in range(1, USERS + 1):
        for movie in (torch.randperm(MOVIES, generator=generator)[:EACH] + 1).sort().values.tolist():
            lines.append(separator.join(str(x) for x in (user, movie, 1 + (user * 7 + movie) % 5, 978300760)))
    return lines


# MovieLens


@pytest.mark.parametrize(("variant", "separator"), [("1m", "::"), ("100k", "\t")])
def test_ratings_are_kept_unchanged(variant: str, separator: str, tmp_path: Path) -> None:
    layout = movielens.VARIANTS[variant]
    write(tmp_path / layout.folder / layout.ratings, movie_lines(separator), "\r\n")  # as Windows ends its lines
    expected = [tuple(map(int, line.split("::")[:3])) for line in movie_lines()]
    assert triples(ready(MovieLensDataModule, tmp_path, variant=variant)) == [(u - 1, i - 1, r) for u, i, r in expected]


# For each step of prepare_data(), a forked child kills itself with SIGKILL in the middle of the step. Then two children
# prepare the same folder at once. They are forked, as is the script, since imports take longer than everything else.
SCRIPT = """
import mtl, os, signal, sys, zipfile
from dataclasses import replace
from pathlib import Path
from unittest import mock
import pooch
import torch
from mtl.data_modules import movielens

root, base_url, md5 = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
movielens.VARIANTS["1m"] = replace(movielens.VARIANTS["1m"], md5=md5)

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def save(tensors, file):
    file.write(b"half"); file.flush(); die()

def receive(self, url, file, pooch):
    Path(file).write_bytes(b"half"); die()

def unpack(archive, folder):
    archive.extract(archive.namelist()[0], folder); die()

def prepare(folder):
    movielens.MovieLensDataModule(str(root / folder), base_url=base_url, batch_size=8).prepare_data()

def fork(folder, *patches):
    if (child := os.fork()) == 0:
        for target, name, replacement in patches:
            mock.patch.object(target, name, replacement).start()
        prepare(folder)
        os._exit(0)
    return child

steps = {
    "fetch": (pooch.HTTPDownloader, "__call__", receive),
    "unpack": (zipfile.ZipFile, "extractall", unpack),
    "parse": (movielens, "read_ratings", die),
    "store": (torch, "save", save),
}
for folder, patch in steps.items():
    assert os.waitstatus_to_exitcode(os.waitpid(fork(folder, patch), 0)[1]) == -signal.SIGKILL, folder

real = movielens.read_ratings
def counted(*args):
    print("parsed", flush=True)
    return real(*args)

children = [fork("both", (movielens, "read_ratings", counted)) for _ in range(2)]
assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
"""


def test_preparing_survives_kills_and_concurrent_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = zipped(tmp_path / "mirror" / "ml-1m.zip", {"ml-1m/README": ["made up"], RATINGS: movie_lines()})
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setitem(movielens.VARIANTS, "1m", replace(movielens.VARIANTS["1m"], md5=md5))
    with serving(archive.parent) as url:
        words = [str(tmp_path), url, md5]
        done = Forked(words, tmp_path / "printed", main=partial(exec, SCRIPT, {})).wait()
        assert done.status == 0, done.output
        assert [line for line in done.output.splitlines() if line == "parsed"] == ["parsed"]
        for folder in ("fetch", "unpack", "parse", "store", "both"):
            data = ready(MovieLensDataModule, tmp_path / folder, download=True, base_url=url)
            assert len(all_rows(data)) == 2 * USERS * EACH
            files = [path.name for path in (tmp_path / folder).rglob("*")]
            assert not [name for name in files if name.endswith(".unpacked")]


# Book-Crossing


def test_records_are_kept_with_ids_in_sorted_order(tmp_path: Path) -> None:
    records = book_records()
    write(tmp_path / BOOKS, book_lines(records))
    data = ready(BooksDataModule, tmp_path, alpha=0.75)
    users, books = (sorted({record[column] for record in records}) for column in (0, 1))
    assert triples(data) == sorted((users.index(u), books.index(b), r) for u, b, r in records)
    assert data.spec.inputs == {"user": Categorical(20), "book": Categorical(24)}
    assert data.spec.tasks == [
        TaskSpec("read", "binary", weight=0.75, classes=("no", "yes")),
        TaskSpec("rating", "regression", weight=0.25),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_core_is_the_largest_possible(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    user, item = (torch.rand(25, 30, generator=generator) < 0.12).nonzero(as_tuple=True)
    kept = drop_rare_ids(user, item, 3)
    for ids in (user[kept], item[kept]):
        assert not len(ids) or int(torch.bincount(ids)[ids].min()) >= 3
    left = dict(enumerate(zip(user.tolist(), item.tolist(), strict=True)))
    while True:  # dropping single records in any order gives the same result
        users, items = (Counter(ids) for ids in zip(*left.values(), strict=True)) if left else ({}, {})
        doomed = [row for row, (one, other) in left.items() if users[one] < 3 or items[other] < 3]
        if not doomed:
            break
        del left[doomed[seed % len(doomed)]]
    assert kept.tolist() == sorted(left)


def test_users_and_books_with_few_records_are_dropped(tmp_path: Path) -> None:
    few = [(1, "B01", 5), (1, "A-new", 5), (2, "B02", 0), (2, "A-new", 0)]
    records = book_records(each=20)
    write(tmp_path / BOOKS, book_lines([*few, *records]))
    kept = triples(ready(BooksDataModule, tmp_path, min_records=5, negatives="per_user"))
    assert kept == sorted(((user - 943) // 3, int(isbn[1:]) - 1, rating) for user, isbn, rating in records)
    with pytest.raises(InputError, match=r"^data\.min_records=25: none of the 404 records of .* lower data\.min_rec"):
        ready(BooksDataModule, tmp_path, min_records=25)


def test_repeated_records_and_isbns_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = [(1, "a", 3), (1, "a", 7), (1, "a", 0), (1, "b", 0), (1, "b", 0), (2, "a", 0), (2, "a", 4), (3, "a", 0)]
    stored = read_records(write(tmp_path / BOOKS, book_lines(records)))
    assert stored["user"].tolist() == [0, 0, 1, 2]
    assert stored["item"].tolist() == [0, 1, 0, 0]
    assert stored["rating"].nan_to_num().tolist() == [7, 0, 4, 0]
    assert "4 records repeat a pair" in caplog.text
    lines = [HEADER, r'"5";"0\"432";"8"', '"5";" x";"0"', '"5";"caf\u00e9; no. 2";"10"', '"5";"x";"1"']
    stored = read_records(write(tmp_path / BOOKS, lines))
    assert stored["item"].tolist() == [0, 1, 2, 3]
    assert stored["rating"].nan_to_num().tolist() == [0, 8, 10, 1]  # sorted: " x", "0...", "caf...", "x"


def test_broken_rows_within_the_limit_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / BOOKS, [*book_lines(), "x", '"5";"B01";"99"'])
    with pytest.raises(InputError, match=r"line 162: 'x' is damaged, like 2 of 162 lines. Expected"):
        ready(BooksDataModule, tmp_path)
    monkeypatch.setattr(books, "MAX_MALFORMED_FRACTION", 2 / 162)
    assert len(triples(ready(BooksDataModule, tmp_path))) == 160
    assert f"{file}, line 162: 'x' is damaged, like 2 of 162 lines; they are skipped" in caplog.text
    assert "BX-Book-Ratings.csv has 162 records, the published file 1149780" in caplog.text


def test_an_archive_that_cannot_be_verified_is_fetched_only_on_demand(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "mirror" / "BX-CSV-Dump.zip", {"BX-Users.csv": ["x"], Path(BOOKS).name: book_lines()})
    folder = tmp_path / "new" / "bookcrossing"
    with serving(archive.parent) as url:
        with pytest.raises(InputError, match=rf"in a way that you trust and put it at {folder}/.*data\.unverified="):
            ready(BooksDataModule, tmp_path / "new", download=True, base_url=url)
        assert not folder.exists()
        data = ready(BooksDataModule, tmp_path / "new", download=True, unverified=True, base_url=url)
        archive.unlink()
        with pytest.raises(InputError, match=r"404 .* put it at .*zip, or set paths\.data_dir"):
            ready(BooksDataModule, tmp_path / "none", download=True, unverified=True, base_url=url)
    assert len(triples(data)) == 160
    assert (folder / "BX-Users.csv").is_file()


# Jester


def matrix(data: JesterDataModule) -> Tensor:
    """Return the ratings of all splits as ``[users, 100]``, in hundredths; -1 marks a pair that is in no split."""
    whole = torch.full((data.spec.inputs["user"].size, JOKES), -1)
    for rows in data.splits.values():
        ratings = (rows.targets["rating"] * 100).round()
        assert torch.equal(rows.targets["rated"] == 0, ratings.isnan())
        whole[rows.inputs["user"], rows.inputs["joke"]] = ratings.nan_to_num(9900).long()
    return whole


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_pair_is_in_one_stratified_split(suffix: str, tmp_path: Path) -> None:
    ratings = joke_ratings(30)
    ratings[0, :3] = torch.tensor([-1000, 1000, 0])
    ratings[4] = 9900  # a user without ratings
    write(tmp_path / f"{JESTER}{suffix}", joke_lines(ratings))
    data = ready(JesterDataModule, tmp_path, alpha=0.75)
    assert torch.equal(matrix(data), ratings)
    scaled = ready(JesterDataModule, tmp_path, rating_unit=5)
    whole, fifth = (each.splits["train"].targets["rating"].nan_to_num(0) for each in (data, scaled))
    torch.testing.assert_close(5 * fifth, whole)
    rated = float((ratings != 9900).sum())
    for rows, share in zip(data.splits.values(), (0.7, 0.15, 0.15), strict=True):
        assert len(rows) == round(3000 * share)
        assert abs(float(rows.targets["rated"].sum()) - share * rated) <= 1
    assert data.spec.inputs == {"user": Categorical(30), "joke": Categorical(JOKES)}
    assert data.spec.tasks == [
        TaskSpec("rated", "binary", weight=0.75, classes=("no", "yes")),
        TaskSpec("rating", "regression", weight=0.25),
    ]


def test_files_are_read_by_name_and_csv_is_preferred(tmp_path: Path) -> None:
    one, two, three = (joke_ratings(5, seed) for seed in range(3))
    folder = tmp_path / "jester"
    write(folder / "jester-data-c.csv", joke_lines(three))
    write(folder / "jester-data-a.csv.gz", joke_lines(one))
    write(folder / "jester-data-b.csv", joke_lines(two))
    for name in ("jester-data-b.csv.gz", "jester-data-a.xls", "user_ids.csv"):
        write(folder / name, ["not read"])
    assert torch.equal(matrix(ready(JesterDataModule, tmp_path)), torch.cat([one, two, three]))
    write(folder / "jester-data-d.csv", joke_lines(one))  # the cache of the other files is not used
    data = ready(JesterDataModule, tmp_path, download=True, base_url="http://127.0.0.1:9")  # no part is missing
    assert torch.equal(matrix(data), torch.cat([one, two, three, one]))


def test_excel_files(tmp_path: Path) -> None:
    xlwt = pytest.importorskip("xlwt")
    ratings, book = joke_ratings(6), xlwt.Workbook()
    sheet = book.add_sheet("jester")
    for row, line in enumerate(joke_lines(ratings)):
        for column, text in enumerate(line.split(",")):
            sheet.write(row, column, float(text))
    file = tmp_path / "jester" / "jester-data-1.xls"
    file.parent.mkdir()
    book.save(str(file))
    assert torch.equal(matrix(ready(JesterDataModule, tmp_path)), ratings)


def test_only_missing_parts_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three archives of made-up parts (4, 5 and 6 users, as text) are served."""
    for number, name in enumerate(jester.ARCHIVE_SHA256):
        lines = joke_lines(joke_ratings(4 + number, number))
        archive = zipped(tmp_path / "mirror" / f"jester_dataset_1_{number + 1}.zip", {f"{name}.xls": lines})
        monkeypatch.setitem(jester.ARCHIVE_SHA256, name, hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(jester, "_read_excel", jester.read_lines)
    mine = joke_ratings(7, seed=9)
    write(tmp_path / "jester" / "jester-data-2.csv", joke_lines(mine))
    with serving(tmp_path / "mirror") as url:
        all_three = ready(JesterDataModule, tmp_path / "new", download=True, base_url=url)
        assert torch.equal(matrix(ready(JesterDataModule, tmp_path)), mine)  # without download, what exists is read
        some = ready(JesterDataModule, tmp_path, download=True, base_url=url)
    assert torch.equal(matrix(all_three), torch.cat([joke_ratings(4 + number, number) for number in range(3)]))
    assert torch.equal(matrix(some), torch.cat([joke_ratings(4), mine, joke_ratings(6, 2)]))
