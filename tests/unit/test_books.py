"""Book-Crossing from small made-up files in the published format: parsing, filtering, splitting, preparing."""

from __future__ import annotations

import logging
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules.books import HEADER, BooksDataModule, core, read_records

from mtl.checks import InputError
from mtl.types import Batch, Categorical, TaskSpec
from tests.file_server import serving

Make = Callable[..., BooksDataModule]
Record = tuple[int, str, int]


def make_records(users: int = 20, books: int = 24, each: int = 8) -> list[Record]:
    """Return records of 20 users (100, 97, ...), each of 8 of the books B01 to B24; a third have no rating."""
    generator = torch.Generator().manual_seed(1)
    return [
        (100 - 3 * user, f"B{book + 1:02}", (user * 7 + book) % 10 + 1 if (user + book) % 3 else 0)
        for user in range(users)
        for book in torch.randperm(books, generator=generator)[:each].tolist()
    ]


def lines_of(records: list[Record]) -> list[str]:
    return [f'"{user}";"{isbn}";"{rating}"' for user, isbn, rating in records]


def write(data_dir: Path, lines: list[str], header: str = HEADER) -> Path:
    file = data_dir / "bookcrossing" / "BX-Book-Ratings.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes("".join(line + "\r\n" for line in [header, *lines]).encode("latin-1"))
    return file


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Build a data module over ``tmp_path``."""

    def build(**kwargs: Any) -> BooksDataModule:
        defaults = {"data_dir": str(tmp_path), "batch_size": 64, "download": False, "min_records": 1}
        return BooksDataModule(**defaults | kwargs)

    return build


@pytest.fixture
def ready(make: Make) -> Make:
    """Build, prepare and set up a data module over the files in ``tmp_path``."""

    def build(**kwargs: Any) -> BooksDataModule:
        data = make(**kwargs)
        data.prepare_data()
        data.setup()
        return data

    return build


def all_rows(data: BooksDataModule) -> Batch:
    parts = [data.splits[name] for name in ("train", "val", "test")]
    return Batch(
        {name: torch.cat([part.inputs[name] for part in parts]) for name in parts[0].inputs},
        {name: torch.cat([part.targets[name] for part in parts]) for name in parts[0].targets},
    )


def triples(rows: Batch) -> list[tuple[int, int, int]]:
    """Return the sorted (user, book, rating or 0) of the read rows."""
    read = rows.targets["read"] == 1
    columns = rows.inputs["user"], rows.inputs["book"], rows.targets["rating"].nan_to_num().long()
    return sorted(zip(*(column[read].tolist() for column in columns), strict=True))


def test_records_are_kept_with_ids_in_sorted_order(tmp_path: Path, ready: Make) -> None:
    records = make_records()
    write(tmp_path, lines_of(records))
    data = ready(alpha=0.75)
    rows = all_rows(data)
    users, books = (sorted({record[column] for record in records}) for column in (0, 1))
    assert triples(rows) == sorted((users.index(u), books.index(b), r) for u, b, r in records)
    assert data.spec.inputs == {"user": Categorical(20), "book": Categorical(24)}
    assert data.spec.tasks == [
        TaskSpec("read", "binary", weight=0.75, classes=("no", "yes")),
        TaskSpec("rating", "regression", weight=0.25),
    ]
    assert len(next(iter(data.train_dataloader()))) == 64


@pytest.mark.parametrize("negatives", ["uniform", "per_user"])
def test_unread_pairs_and_records_without_a_rating(tmp_path: Path, ready: Make, negatives: str) -> None:
    records = make_records()
    write(tmp_path, lines_of(records))
    data = ready(negatives=negatives)
    rows = all_rows(data)
    read, rating = rows.targets["read"] == 1, rows.targets["rating"]
    assert int(read.sum()) == int((~read).sum()) == len(records)
    assert bool(rating[~read].isnan().all())
    assert int(rating[read].isnan().sum()) == sum(record[2] == 0 for record in records) > 40
    assert float(rating[read].nan_to_num(5).min()) >= 1
    assert len((rows.inputs["user"] * 1000 + rows.inputs["book"]).unique()) == len(rows)  # no duplicates
    unrated = [
        int(((part.targets["read"] == 1) & part.targets["rating"].isnan()).sum()) for part in data.splits.values()
    ]
    whole = sum(unrated)
    assert all(abs(n - share * whole) <= 1 for n, share in zip(unrated, (0.8, 0.1, 0.1), strict=True))


def test_core_by_hand() -> None:
    # At least 2: item 3 has one record and goes; user 2 then has one record and goes; item 0 still has two
    user = torch.tensor([0, 0, 1, 1, 2, 2])
    item = torch.tensor([0, 1, 0, 1, 0, 3])
    assert core(user, item, 1).tolist() == [0, 1, 2, 3, 4, 5]
    assert core(user, item, 2).tolist() == [0, 1, 2, 3]
    assert core(user, item, 3).tolist() == []
    # a chain: after its ends are dropped, the next records are ends
    assert core(torch.tensor([0, 1, 1, 2, 2]), torch.tensor([0, 0, 1, 1, 2]), 2).tolist() == []


@pytest.mark.parametrize("seed", range(10))
def test_core_is_the_largest_possible(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    user, item = (torch.rand(25, 30, generator=generator) < 0.12).nonzero(as_tuple=True)
    kept = core(user, item, 3)
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


def test_users_and_books_with_few_records_are_dropped(tmp_path: Path, ready: Make) -> None:
    few = [(1, "B01", 5), (1, "A-new", 5), (2, "B02", 0), (2, "A-new", 0)]
    records = make_records(each=20)
    write(tmp_path, lines_of([*few, *records]))
    kept = triples(all_rows(ready(min_records=5, negatives="per_user")))
    assert kept == sorted(((user - 43) // 3, int(isbn[1:]) - 1, rating) for user, isbn, rating in records)
    with pytest.raises(InputError) as caught:
        ready(min_records=25)
    assert str(caught.value) == (
        f"data.min_records=25: none of the 404 records of {tmp_path}/bookcrossing/BX-Book-Ratings.csv is left if every "
        "user and every book must have 25; lower data.min_records"
    )


def test_repeated_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = [(1, "a", 3), (1, "a", 7), (1, "a", 0), (1, "b", 0), (1, "b", 0), (2, "a", 0), (2, "a", 4), (3, "a", 0)]
    stored = read_records(write(tmp_path, lines_of(records)), 0.0)
    assert stored["user"].tolist() == [0, 0, 1, 2]
    assert stored["item"].tolist() == [0, 1, 0, 0]
    assert stored["rating"].nan_to_num().tolist() == [7, 0, 4, 0]
    assert "4 records repeat a pair" in caplog.text


def test_isbns_are_not_normalised(tmp_path: Path) -> None:
    lines = [r'"5";"0\"432";"8"', '"5";" x";"0"', '"5";"caf\u00e9; no. 2";"10"', '"5";"x";"1"']
    stored = read_records(write(tmp_path, lines), 0.0)
    assert stored["item"].tolist() == [0, 1, 2, 3]
    assert stored["rating"].nan_to_num().tolist() == [0, 8, 10, 1]  # sorted: " x", "0...", "caf...", "x"


DAMAGE = {
    "too few fields": '"5";"B01"',
    "too many fields": '"5";"B01";"3";"1"',
    "no quotes": "5;B01;3",
    "unbalanced quotes": '"5";"B01;"3"',
    "quote inside": '"5";"B"01";"3"',
    "cut off": '"5";"B0',
    "user is text": '"five";"B01";"3"',
    "negative user": '"-5";"B01";"3"',
    "huge user number": '"99999999999999999999";"B01";"3"',
    "no ISBN": '"5";"";"3"',
    "blank ISBN": '"5";" ";"3"',
    "rating too high": '"5";"B01";"11"',
    "negative rating": '"5";"B01";"-1"',
    "half a point": '"5";"B01";"3.5"',
    "no rating": '"5";"B01";""',
    "another separator": '"5","B01","3"',
    "empty": "",
    "long": "\0" * 500,
}


@pytest.mark.parametrize("row", DAMAGE.values(), ids=DAMAGE.keys())
def test_broken_rows_beyond_the_limit_are_named(tmp_path: Path, make: Make, row: str) -> None:
    lines = lines_of(make_records())
    lines[16], lines[20] = row, "x"
    file = write(tmp_path, lines)
    with pytest.raises(InputError) as caught:
        make(max_broken=0.01).prepare_data()
    message = str(caught.value)
    assert message.startswith(f"{file}, line 18: {row[:20]!r}"[:-1])
    assert "is damaged, like 2 of 160 lines. Expected" in message
    assert "or raise data.max_broken" in message
    assert len(message) < 900


def test_broken_rows_within_the_limit_are_skipped(tmp_path: Path, ready: Make, caplog: Any) -> None:
    records = make_records()
    file = write(tmp_path, [*lines_of(records), "x", '"5";"B01";"99"'])
    data = ready(max_broken=2 / 162)
    assert len(triples(all_rows(data))) == len(records)
    assert f"{file}, line 162: 'x' is damaged, like 2 of 162 lines; they are skipped" in caplog.text
    with pytest.raises(InputError, match="line 162"):  # the cache of the wider limit is not used
        ready(max_broken=0.01)


def test_unexpected_number_of_records_is_a_warning(tmp_path: Path, ready: Make, caplog: Any) -> None:
    write(tmp_path, lines_of(make_records()))
    ready()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].endswith("BX-Book-Ratings.csv has 160 records, the published file 1149780")


def zip_records(path: Path, name: str = "BX-Book-Ratings.csv") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("BX-Users.csv", "made up")
        archive.writestr(name, "\r\n".join([HEADER, *lines_of(make_records())]))


def test_download_unpack_parse(tmp_path: Path, ready: Make) -> None:
    zip_records(tmp_path / "mirror" / "BX-CSV-Dump.zip")
    with serving(tmp_path / "mirror") as url:
        data = ready(data_dir=str(tmp_path / "new"), download=True, unverified=True, base_url=url)
    assert len(triples(all_rows(data))) == 160
    assert (tmp_path / "new" / "bookcrossing" / "BX-Users.csv").is_file()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["bookcrossing", "cache"]


def test_archive_missing_on_the_server(tmp_path: Path, make: Make) -> None:
    with serving(tmp_path) as url, pytest.raises(InputError) as caught:
        make(download=True, unverified=True, base_url=url).prepare_data()
    folder = tmp_path / "bookcrossing"
    assert str(caught.value) == (
        "cannot download BX-CSV-Dump.zip: 'the server answered 404 File not found'. Without the network, get "
        f"{url}/BX-CSV-Dump.zip elsewhere and put it at {folder}/BX-CSV-Dump.zip, or unzip it so that "
        f"{folder}/BX-Book-Ratings.csv exists, or set data.data_dir to the folder of your data"
    )


def test_an_archive_that_cannot_be_verified_is_not_fetched(tmp_path: Path, make: Make) -> None:
    zip_records(tmp_path / "mirror" / "BX-CSV-Dump.zip")
    with serving(tmp_path / "mirror") as url, pytest.raises(InputError) as caught:
        make(download=True, base_url=url).prepare_data()
    folder = tmp_path / "bookcrossing"
    assert f"get {url}/BX-CSV-Dump.zip in a way that you trust and put it at {folder}/BX-CSV-Dump.zip" in str(
        caught.value
    )
    assert "data.unverified=true" in str(caught.value)
    assert not folder.exists()


@pytest.mark.parametrize("download", [False, True])
def test_archive_downloaded_by_hand(download: bool, tmp_path: Path, ready: Make) -> None:
    zip_records(tmp_path / "bookcrossing" / "BX-CSV-Dump.zip")
    assert len(triples(all_rows(ready(download=download)))) == 160


def test_archive_with_other_content(tmp_path: Path, make: Make) -> None:
    zip_records(tmp_path / "bookcrossing" / "BX-CSV-Dump.zip", "other.csv")
    with pytest.raises(InputError, match=r"BX-CSV-Dump\.zip contains no BX-Book-Ratings\.csv"):
        make().prepare_data()
