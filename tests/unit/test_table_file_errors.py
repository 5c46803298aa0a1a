"""Files of a user's table that are damaged, of another form or too large: one sentence; unusual ones are read."""

from __future__ import annotations

import gzip
import os
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from mtl.data_modules.files import reading
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables import row_source
from mtl.data_modules.tables.encoder import NUMERIC
from mtl.data_modules.tables.row_source import RowSource

from mtl.checks import InputError
from tests.table_refusals import GOOD, module, parquet, refusal, save, with_lines

ENDS: dict[str, Callable[[], bytes]] = {  # the same table in each format
    ".csv": GOOD.encode,
    ".csv.gz": lambda: gzip.compress(GOOD.encode()),
    ".tsv": lambda: GOOD.replace(",", "\t").encode(),
    ".parquet": lambda: parquet(pl.read_csv(GOOD.encode())),
}


def rows(data: TableDataModule) -> int:
    return sum(map(len, data.splits.values()))


TEXTS = {  # content of t.csv: the message
    "empty": ("", "t.csv is empty"),
    "header alone": ("a,y\n", "t.csv has a header but no rows"),
    "same names": ("a,y,y\n1,2,3\n", "2 columns are called 'y': give each a name of its own"),
    "no last name": ("a,b, \n1,2,3\n", "the name '' of a column is empty"),
    "name of two lines": (
        'a,"b\nc",y\n1,2,3\n',
        r"the name 'b\nc' of a column is empty or contains control characters",
    ),
    "numeric columns": (GOOD.replace("b", "numeric columns", 1), "rename the column 'numeric columns'"),
    "carriage returns": (GOOD.replace("\n", "\r"), "has a header but no rows"),
    "latin-1": (
        GOOD.replace("S", "\xe9", 1).encode("latin-1"),
        "t.csv, line 2: invalid continuation byte; save",
    ),
    "parquet": (parquet(pl.DataFrame({"y": [0, 1] * 20})), "save the table as CSV in UTF-8"),
    "too few": (with_lines(5, "1.5,S"), "row 4 has 2 cells, but the first line names 3 columns (separated by ',')"),
    "nothing": (with_lines(5, ""), "row 4 has 1 cells"),
    "too many": (with_lines(5, "1.5,S,0,1"), "row 4 has 4 cells"),
    "line feed in quotes": (with_lines(5, '1.5,"S\nT",0\n1.5'), "row 5 has 1 cells"),
    "open quote": (with_lines(5, '1.5,"S,0'), "cannot read"),
    "text among numbers": (with_lines(8, "z,S,0"), "t.csv, column 'a', row 7: 'z' is not a number, but most"),
    "huge number": (with_lines(8, "-1e308,S,0"), "column 'a', row 7: '-1e308' is so large that"),
    "one label": ("a,y\n" + "1,yes\n" * 20, "column 'y': all 20 labels of the training rows are 'yes'"),
    "no label": ("a,y\n" + "1,\n" * 20, "no training row has a label for task 'y'"),
    "three labels": ("a,y\n" + "1,a\n1,b\n1,c\n" * 20, "3 different labels, a, b, c; use kind=multiclass"),
    "constant input": (
        "a,y\n" + "1,0\n1,1\n" * 20,
        "every input column is constant in the training rows, an identifier, or free text",
    ),
    "no input": ("y\n" + "0\n1\n" * 20, "no column is left as input"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_texts(name: str, tmp_path: Path) -> None:
    content, message = TEXTS[name]
    path = save(tmp_path / "t.csv", content)
    found = refusal(path, split={"fractions": [1, 0, 0]}, val_path=str(path), test_path=str(path))
    assert message in found


@pytest.mark.parametrize("separator", ["", "ab", "\n", '"', "\xe9", ";"])
def test_unsuitable_separators_are_refused(separator: Any, tmp_path: Path) -> None:
    message = refusal(save(tmp_path / "t.csv", GOOD), csv={"separator": separator})
    assert "separator=" in message or separator == ";"  # which is not that of the file


def test_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "t.csv.gz", gzip.compress(GOOD.encode())[:40])
    assert "t.csv.gz is damaged or not a gzip file" in refusal(path)


def test_files_that_unpack_to_much_more_than_themselves_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = bytes(1 << 16)
    with gzip.open(tmp_path / "bomb.csv.gz", "wb", compresslevel=1) as file:
        for _ in range(2048):
            file.write(zeros)
    tracemalloc.start()
    assert re.search(
        r"bomb.csv.gz holds more than 100 times its [\d,]+ bytes: unpack it", refusal(tmp_path / "bomb.csv.gz")
    )
    assert tracemalloc.get_traced_memory()[1] < 1.5 * 2**27
    tracemalloc.stop()
    draw = random.Random(0).random
    save(tmp_path / "much.csv.gz", gzip.compress("".join(f"{draw()},{draw()}\n" for _ in range(3000)).encode()))
    pl.DataFrame({"a": [0] * 4000, "y": [1] * 4000}).write_parquet(tmp_path / "much.parquet")
    monkeypatch.setattr(reading, "HARMLESS_BYTES", 1000)
    monkeypatch.setattr(reading, "MEMORY", 100_000)
    assert "much.csv.gz holds more than a table in memory may have" in refusal(tmp_path / "much.csv.gz")
    monkeypatch.setattr(row_source, "MEMORY", 100_000)
    message = refusal(tmp_path / "much.parquet")
    monkeypatch.setattr(row_source, "MEMORY", 4000 * (2 * 16 + 1))  # the cells alone would fit
    assert refusal(tmp_path / "much.parquet") == message
    assert "4,000 rows of 2 columns, which do not fit into memory: use data.window_rows=1048576" in message


def test_messages_of_several_files_name_the_file_and_its_row(tmp_path: Path) -> None:
    lines = GOOD.splitlines()
    for part in range(4):
        save(tmp_path / "rows" / f"{part}.csv", "\n".join([lines[0], *lines[1 + 10 * part : 11 + 10 * part]]))
    bad = tmp_path / "rows" / "2.csv"
    save(bad, bad.read_text().replace("26.5", "many"))
    assert f"{bad}, column 'a', row 7: 'many' is not a number" in refusal(tmp_path / "rows")
    save(bad, bad.read_text().replace("many,S,1", "26.5,S,?"))
    good = save(tmp_path / "t.csv", GOOD)
    assert f"{bad}, column 'y', row 7: '?' is a label of task 'y' that does" in refusal(good, test_path=str(bad.parent))


def test_first_uneven_row_is_named_whatever_the_others_have(tmp_path: Path) -> None:
    chance, path = random.Random(0), tmp_path / "t.csv"
    for _ in range(100):
        lines = ["x,x,x"] * 6
        for _ in range(chance.randrange(4)):  # lines too long may make up for lines too short
            lines[chance.randrange(6)] = ",".join("x" * chance.randrange(2, 5))
        save(path, "\n".join(["a,b,c", *lines]))
        uneven = [number for number, line in enumerate(lines, 1) if line.count(",") != 2]
        if uneven:
            with pytest.raises(InputError, match=f"row {uneven[0]} has "):
                RowSource.open(path, separator=",")
        else:
            assert RowSource.open(path, separator=",").count == 6


@pytest.mark.parametrize("suffix", ENDS)
@pytest.mark.parametrize("folder", ["x [y]", "**"])
def test_paths_with_glob_characters_are_files(folder: str, suffix: str, tmp_path: Path) -> None:
    path = save(tmp_path / folder / f"[t]*{suffix}", ENDS[suffix]())
    save(tmp_path / "y" / f"t{suffix}", "a,b,y\n")  # what the pattern would match
    assert rows(module(path)) == 40


@pytest.mark.parametrize("suffix", ENDS)
def test_files_that_cannot_be_read_are_refused(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"folder{suffix}").mkdir()
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
    (tmp_path / f"link{suffix}").symlink_to("nowhere")
    assert f"data.path={tmp_path}/folder{suffix} is a folder without" in refusal(tmp_path / f"folder{suffix}")
    assert "is a pipe or a device" in refusal(tmp_path / f"pipe{suffix}")
    assert "is a pipe or a device" in refusal(tmp_path / f"zero{suffix}")
    assert "no such file" in refusal(tmp_path / f"link{suffix}")
    good = save(tmp_path / f"t{suffix}", ENDS[suffix]())
    assert "no such file" in refusal(good / "below.csv")
    if os.geteuid() != 0:  # root may read every file
        good.chmod(0)
        assert "Permission denied" in refusal(good)


def test_every_damage_of_a_parquet_file_gives_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content, path, chance = ENDS[".parquet"](), tmp_path / "t.parquet", random.Random(0)
    damaged = [content[:size] for size in (1, 4, 100, len(content) // 2, len(content) - 1)]
    for _ in range(40):
        index = chance.randrange(len(content))
        damaged.append(content[:index] + bytes([content[index] ^ 0xFF]) + content[index + 1 :])
    refused = 0
    for raw in damaged:
        try:
            module(save(path, raw))
        except InputError:
            refused += 1
    assert refused > 10
    capfd.readouterr()  # polars may write about a panic


def test_unsuitable_column_names_of_parquet_files_are_refused(tmp_path: Path) -> None:
    content = parquet(pl.DataFrame({"ab1": [1, 2] * 20, "ab2": [0, 1] * 20}))
    path = save(tmp_path / "t.parquet", content.replace(b"ab2", b"ab1"))
    assert "with a name of its own for each column" in refusal(path, {"ab1": {"kind": "binary"}})
    for name, message in (("y ", "2 columns are called 'y'"), ("", "the name '' of a column is empty")):
        save(path, parquet(pl.DataFrame({"y": [0, 1] * 20, name: [0, 1] * 20})))
        for streamed in (False, True):
            assert message in refusal(path, streamed=streamed)


@pytest.mark.parametrize("change", ["short", "gone", "other rows"])
def test_file_that_changes_while_it_is_streamed_is_one_message(
    change: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table, file = pl.read_csv((GOOD + "".join(GOOD.splitlines(True)[1:]) * 9).encode()), tmp_path / "rows" / "1.parquet"
    for number in range(3):
        save(tmp_path / "rows" / f"{number}.parquet", parquet(table[100 * number : 100 * (number + 1)]))
    data = module(tmp_path / "rows", streamed=True, window_rows=100)
    content = file.read_bytes()
    file.unlink()
    if change != "gone":
        file.write_bytes(content[:200] if change == "short" else parquet(table))
    message = r"^.*/1.parquet was changed, replaced or deleted while it was being read; .* until the run ends$"
    with pytest.raises(InputError, match=message):
        list(data.train_dataloader())
    assert capfd.readouterr().err == ""


def test_unusual_texts_are_read(tmp_path: Path) -> None:
    quoted = GOOD.replace("S", '"S,""x""\nz"')
    texts = ("\ufeff" + GOOD, GOOD.replace("\n", "\r\n"), GOOD + "\n\n", GOOD[:-1], quoted, GOOD.replace("S", "\u2603"))
    for content in (*texts, GOOD.replace("S", '"' + "s" * 2**18 + '"', 1)):
        data = module(save(tmp_path / "t.csv", content), {"z": {"column": "y", "kind": "binary"}}, ignore=["a"])
        assert list(data.spec.inputs) == ["b"]
        assert rows(data) == 40
    text = GOOD.replace("a,b,y", "2024,b. [c]/{d} \N{SNOWMAN},1", 1)
    data = module(save(tmp_path / "t.csv", text), {"y": {"kind": "binary", "column": 1, "positive": 0}})
    assert list(data.spec.inputs) == ["b. [c]/{d} \N{SNOWMAN}", NUMERIC]
    assert "ignore[0]=2024: must be text" in refusal(tmp_path / "t.csv", ignore=[2024])
