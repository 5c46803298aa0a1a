"""MovieLens from small made-up files in the published formats: parsing, unwatched pairs, splitting, preparing."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules import movielens
from mtl.data_modules.movielens import MovieLensDataModule
from torch import Tensor

from mtl.checks import InputError
from mtl.types import Batch, Categorical
from tests.file_server import serving
from tests.programs import Forked

USERS, MOVIES, EACH = 40, 60, 20
SEPARATORS = {"1m": "::", "100k": "\t"}
Make = Callable[..., MovieLensDataModule]


def make_lines(separator: str = "::") -> list[str]:
    """Return the lines of 40 users who each rate 20 of the movies 1, 2, ..., 60 with 1 to 5."""
    generator = torch.Generator().manual_seed(1)
    lines = []
    for user in range(1, USERS + 1):
        for movie in (torch.randperm(MOVIES, generator=generator)[:EACH] + 1).sort().values.tolist():
            lines.append(separator.join(str(x) for x in (user, movie, 1 + (user * 7 + movie) % 5, 978300760)))
    return lines


def write(data_dir: Path, lines: list[str], variant: str = "1m") -> Path:
    layout = movielens.VARIANTS[variant]
    file = data_dir / layout.folder / layout.ratings
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="latin-1", newline="")
    return file


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Build a data module over ``tmp_path``."""

    def build(**kwargs: Any) -> MovieLensDataModule:
        return MovieLensDataModule(**{"data_dir": str(tmp_path), "batch_size": 64, "download": False} | kwargs)

    return build


@pytest.fixture
def ready(tmp_path: Path, make: Make) -> Make:
    """Build, prepare and set up a data module over the made-up ratings."""

    def build(**kwargs: Any) -> MovieLensDataModule:
        data = make(**kwargs)
        if not data.source.exists():
            variant = kwargs.get("variant", "1m")
            write(tmp_path, make_lines(SEPARATORS[variant]), variant)
        data.prepare_data()
        data.setup()
        return data

    return build


def all_rows(data: MovieLensDataModule) -> Batch:
    parts = [data.splits[name] for name in ("train", "val", "test")]
    return Batch(
        {name: torch.cat([part.inputs[name] for part in parts]) for name in parts[0].inputs},
        {name: torch.cat([part.targets[name] for part in parts]) for name in parts[0].targets},
    )


def codes(rows: Batch) -> Tensor:
    return rows.inputs["user"] * 10_000 + rows.inputs["item"]


@pytest.mark.parametrize("variant", ["1m", "100k"])
def test_ratings_are_kept_unchanged(ready: Make, variant: str) -> None:
    rows = all_rows(ready(variant=variant))
    seen = rows.targets["watch"] == 1
    triples = zip(rows.inputs["user"][seen], rows.inputs["item"][seen], rows.targets["rating"][seen], strict=True)
    lines = [line.split("::")[:3] for line in make_lines()]
    assert sorted((int(u) + 1, int(i) + 1, int(r)) for u, i, r in triples) == sorted(tuple(map(int, x)) for x in lines)


@pytest.mark.parametrize("negatives", ["uniform", "per_user"])
def test_unwatched_pairs(ready: Make, negatives: str) -> None:
    rows = all_rows(ready(negatives=negatives))
    watch, rating = rows.targets["watch"], rows.targets["rating"]
    assert int(watch.sum()) == int((1 - watch).sum()) == USERS * EACH
    assert torch.equal(rating.isnan(), watch == 0)
    assert len(codes(rows).unique()) == len(rows)  # no watched pair, no duplicates
    drawn = torch.bincount(rows.inputs["user"][watch == 0], minlength=USERS)
    assert bool((drawn == EACH).all()) == (negatives == "per_user")
    assert int(rows.inputs["item"].max()) < MOVIES


def test_unwatched_pairs_use_only_users_and_movies_that_occur(tmp_path: Path, ready: Make) -> None:
    write(tmp_path, [line for line in make_lines() if line.split("::")[1] != "7" and not line.startswith("3::")])
    data = ready()
    rows = all_rows(data)
    assert not bool((rows.inputs["item"] == 6).any())
    assert not bool((rows.inputs["user"] == 2).any())
    assert data.spec.inputs == {"user": Categorical(USERS), "item": Categorical(MOVIES)}  # ids do not shift


def test_users_who_rated_most_movies(tmp_path: Path, ready: Make) -> None:
    lines = [f"1::{movie}::3::0" for movie in range(1, 41)] + [f"2::{movie}::4::0" for movie in range(31, 51)]
    write(tmp_path, lines)
    with pytest.raises(InputError, match=r"data\.negatives=uniform: needs 60 unseen pairs.* leave only 40; use .*per_"):
        ready()
    rows = all_rows(ready(negatives="per_user"))
    assert torch.bincount(rows.inputs["user"][rows.targets["watch"] == 0]).tolist() == [10, 20]


def test_no_unwatched_pairs_are_left(tmp_path: Path, ready: Make) -> None:
    write(tmp_path, [f"{user}::{movie}::3::0" for user in range(1, 9) for movie in range(1, 9)])
    with pytest.raises(InputError, match="every user has seen every movie"):
        ready(negatives="per_user")


def test_each_split_has_its_share_of_each_stratum(ready: Make) -> None:
    data = ready()
    whole = torch.bincount(all_rows(data).targets["rating"].nan_to_num().long())
    for name, share in (("train", 0.8), ("val", 0.1), ("test", 0.1)):
        part = torch.bincount(data.splits[name].targets["rating"].nan_to_num().long())
        assert bool(((part - share * whole).abs() <= 1).all()), name
    assert len(codes(all_rows(data)).unique()) == 2 * USERS * EACH  # disjoint and complete
    assert data.splits["train"].inputs["user"].diff().abs().sum() > USERS  # and shuffled


def test_too_few_ratings(tmp_path: Path, ready: Make) -> None:
    write(tmp_path, ["1::1::3::0", "2::2::3::0"])
    with pytest.raises(InputError, match=r"too few rows for the val share of data\.split"):
        ready()


DAMAGE = {
    "too few fields": "5::6::3",
    "too many fields": "5::6::3::0::1",
    "text": "five::6::3::0",
    "latin-1 text": "caf\u00e9::6::3::0",
    "rating too high": "5::6::6::0",
    "rating too low": "5::6::0::0",
    "half a star": "5::6::3.5::0",
    "no rating": "5::6::::0",
    "user 0": "0::6::3::0",
    "user too high": "6041::6::3::0",
    "movie 0": "5::0::3::0",
    "negative movie": "5::-6::3::0",
    "movie too high": "5::3953::3::0",
    "huge number": "5::99999999999999999999::3::0",
    "no timestamp": "5::6::3::",
    "space": "5:: 6::3::0",
    "another separator": "5,6,3,0",
    "empty": "",
    "a pair again": make_lines()[0],
    "zeros of a crashed disk": "\0" * 500,
}


@pytest.mark.parametrize("row", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_row_is_named(tmp_path: Path, make: Make, row: str) -> None:
    lines = make_lines()
    lines[16] = row
    lines[20] = "x"
    file = write(tmp_path, lines)
    with pytest.raises(InputError) as caught:
        make().prepare_data()
    message = str(caught.value)
    assert message.startswith(f"{file}, line 17: {row[:20]!r}"[:-1])
    assert "is damaged, like 2 of 800 lines. Expected user::movie::rating::timestamp, whole numbers" in message
    assert message.endswith(f"Repair the file, or delete the folder {file.parent} to have it fetched again")
    assert len(message) < 700


def test_windows_line_ends_and_no_last_line_end(tmp_path: Path, ready: Make) -> None:
    write(tmp_path, []).write_bytes("\r\n".join(make_lines()).encode())
    assert len(all_rows(ready())) == 2 * USERS * EACH


def zip_ratings(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ml-1m/README", "made up")
        archive.writestr("ml-1m/ratings.dat", "\n".join(lines) + "\n")
    return path


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a made-up ml-1m.zip, make its checksum the expected one, and yield the address."""
    archive = zip_ratings(tmp_path / "mirror" / "ml-1m.zip", make_lines())
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setitem(movielens.VARIANTS, "1m", replace(movielens.VARIANTS["1m"], md5=md5))
    with serving(archive.parent) as url:
        yield url


def test_archive_downloaded_by_hand_needs_no_network(tmp_path: Path, make: Make) -> None:
    zip_ratings(tmp_path / "ml-1m.zip", make_lines())
    data = make()
    data.prepare_data()
    data.setup()
    assert len(all_rows(data)) == 2 * USERS * EACH


def test_archive_with_other_content(tmp_path: Path, make: Make) -> None:
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(InputError, match=r"ml-1m\.zip contains no ml-1m/ratings\.dat"):
        make().prepare_data()


# For each step of prepare_data(), a forked child kills itself with SIGKILL in the middle of the step. Then two children
# prepare the same folder at once. They are forked, as is the script, since imports take longer than everything else.
SCRIPT = """
import mtl, os, signal, sys, zipfile
from dataclasses import replace
from pathlib import Path
from unittest import mock
import torch
from mtl.data_modules import movielens
from mtl.data_modules.files import cache, download

root, base_url, md5 = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
movielens.VARIANTS["1m"] = replace(movielens.VARIANTS["1m"], md5=md5)

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def save(tensors, file):
    file.write(b"half"); file.flush(); die()

def receive(self, response, have):
    self.part.write_bytes(b"half"); die()

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
    "fetch": (download._Resumed, "_receive", receive),
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


def test_preparing_survives_kills_and_concurrent_processes(tmp_path: Path, make: Make, mirror: str) -> None:
    words = [str(tmp_path), mirror, movielens.VARIANTS["1m"].md5]
    done = Forked(words, tmp_path / "printed", main=partial(exec, SCRIPT, {})).wait()
    assert done.status == 0, done.output
    assert [line for line in done.output.splitlines() if line == "parsed"] == ["parsed"]
    for folder in ("fetch", "unpack", "parse", "store", "both"):
        data = make(data_dir=str(tmp_path / folder), download=True, base_url=mirror)
        data.prepare_data()
        data.setup()
        assert len(all_rows(data)) == 2 * USERS * EACH
        files = [path.name for path in (tmp_path / folder).rglob("*")]
        assert not [name for name in files if name.endswith((".unpacked", ".part"))]


def test_max_rows_keeps_a_random_part(ready: Make) -> None:
    """The pairs kept are pairs of the whole data set, about half of them watched; other options change nothing."""
    whole, part = ready(), ready(max_rows=300)
    pairs = [rows(module) for module in (whole, part)]
    assert len(pairs[0]) == 2 * USERS * EACH
    assert len(pairs[1]) == 300
    assert pairs[1] < pairs[0]
    assert 100 < sum(watch for *_, watch in pairs[1]) < 200
    assert rows(ready(max_rows=300)) == pairs[1]
    assert rows(ready(max_rows=10**6)) == pairs[0]
    with pytest.raises(InputError, match=r"data\.max_rows=0: must be a whole number from 1"):
        ready(max_rows=0)


def rows(module: MovieLensDataModule) -> set[tuple[int, int, float]]:
    """Return (user, item, watch) of the rows of all splits."""
    found = set()
    for split in module.splits.values():
        columns = (split.inputs["user"], split.inputs["item"], split.targets["watch"])
        found |= set(zip(*(column.tolist() for column in columns), strict=True))
    return found
