"""A user's table in all its possible states: names, paths, cells, types and options that do not fit."""

from __future__ import annotations

import gzip
import io
import math
import os
import random
import re
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables import reading
from mtl.data_modules.tables.encoder import NUMERIC
from mtl.data_modules.tables.reading import read_table

from mtl.checks import InputError

TASKS = {"y": {"kind": "binary"}}
GOOD = "a,b,y\n" + "".join(f"{i}.5,{'ST'[i % 2]},{i // 2 % 2}\n" for i in range(40))


def module(path: Path, tasks: Any = TASKS, **options: Any) -> TableDataModule:
    data = TableDataModule(str(path), tasks, batch_size=8, **options)
    data.prepare_data()
    data.setup()
    return data


def save(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(frame: pl.DataFrame) -> bytes:
    target = io.BytesIO()
    frame.write_parquet(target)
    return target.getvalue()


def refusal(path: Path, tasks: Any = TASKS, **options: Any) -> str:
    """Return the message that refuses a table."""
    with pytest.raises(InputError) as caught:
        module(path, tasks, **options)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    return message


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("a,y,y", "columns 2 and 3 are both called 'y': give each a name of its own"),
        ("a,y, y", "columns 2 and 3 are both called 'y'"),
        ('a,"y",y', "columns 2 and 3 are both called 'y'"),
        (",b,y", "column 1 of 3 has no name"),
        ("a,b, ", "column 3 of 3 has no name"),
        ('a,"b\nc",y', r"the name of column 2, 'b\nc', contains line breaks or control characters"),
        ("a,b\x1b[31m,y", r"the name of column 2, 'b\x1b[31m', contains"),
    ],
)
def test_unsuitable_column_names_of_csv_files_are_refused(tmp_path: Path, header: str, message: str) -> None:
    path = save(tmp_path / "t.csv", header + "\n" + "1.5,2,0\n2.5,1,1\n" * 20)
    assert message in refusal(path)


def test_unsuitable_column_names_of_parquet_files_are_refused(tmp_path: Path) -> None:
    content = parquet(pl.DataFrame({"ab1": [1, 2] * 20, "ab2": [0, 1] * 20}))
    path = save(tmp_path / "t.parquet", content.replace(b"ab2", b"ab1"))
    assert "has columns of one name" in refusal(path, {"ab1": {"kind": "binary"}})
    save(path, parquet(pl.DataFrame({"y": [0, 1] * 20, "y ": [0, 1] * 20})))
    assert "columns 1 and 2 are both called 'y'" in refusal(path)
    save(path, parquet(pl.DataFrame({"y": [0, 1] * 20, "": [0, 1] * 20})))
    assert "column 2 of 2 has no name" in refusal(path)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".tsv", ".parquet"])
@pytest.mark.parametrize("folder", ["x [y]", "*", "a?b", "{a,b}", "**"])
def test_paths_with_glob_characters_are_files(tmp_path: Path, folder: str, suffix: str) -> None:
    path, frame = tmp_path / folder / f"[t]*{suffix}", pl.read_csv(GOOD.encode())
    content = {
        ".csv": GOOD.encode(),
        ".csv.gz": gzip.compress(GOOD.encode()),
        ".tsv": GOOD.replace(",", "\t").encode(),
        ".parquet": parquet(frame),
    }[suffix]
    save(path, content)
    save(tmp_path / "y" / f"t{suffix}", "a,b,y\n")  # what the pattern would match
    assert sum(len(rows) for rows in module(path).splits.values()) == 40


def test_folders_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    for suffix in (".csv", ".csv.gz", ".tsv", ".parquet"):
        (tmp_path / f"folder{suffix}").mkdir()
        os.mkfifo(tmp_path / f"pipe{suffix}")
        (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
        (tmp_path / f"link{suffix}").symlink_to("nowhere")
        assert f"data.path={tmp_path}/folder{suffix} is a folder without" in refusal(tmp_path / f"folder{suffix}")
        assert "is a pipe or a device" in refusal(tmp_path / f"pipe{suffix}")
        assert "is a pipe or a device" in refusal(tmp_path / f"zero{suffix}")
        assert "no such file" in refusal(tmp_path / f"link{suffix}")
    good = save(tmp_path / "t.csv", GOOD)
    assert f"data.test_path={tmp_path}/folder.csv is a folder without" in refusal(
        good, test_path=str(tmp_path / "folder.csv")
    )
    assert "no such file" in refusal(good / "below.csv")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_file_without_permission_is_refused(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"t{suffix}", GOOD)
    path.chmod(0)
    assert "Permission denied" in refusal(path)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_file_that_cannot_be_opened_is_refused(
    tmp_path: Path, suffix: str, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / f"t{suffix}", GOOD)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(InputError, match=rf"cannot read .*: {error.strerror}$"):
        read_table(path, ",", [])


@pytest.mark.parametrize(
    ("content", "line", "byte"),
    [
        (GOOD.encode("utf-16"), 1, "0xff"),
        (GOOD.replace("S", "\xe9", 1).encode("latin-1"), 2, "0xe9"),
        (GOOD.replace("S", "\0", 1).encode(), 2, "0x00"),
        (gzip.compress(GOOD.encode()), 1, "0x8b"),
        (parquet(pl.DataFrame({"y": [0, 1] * 20})), 1, "0x00"),
        (GOOD.encode() + b"\xc3", 42, "0xc3"),
    ],
    ids=["utf-16", "latin-1", "NUL", "gzip", "parquet", "cut character"],
)
def test_bytes_that_are_not_text_are_refused_with_their_line(
    tmp_path: Path, content: bytes, line: int, byte: str
) -> None:
    message = refusal(save(tmp_path / "t.csv", content))
    assert re.search(rf"t\.csv, line \d+: the byte {byte}|t\.csv, line {line}: the byte 0x", message)
    assert "save the table as CSV in UTF-8" in message


def test_text_that_continues_over_blocks_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BYTES", 7)
    text = GOOD.replace("S", "\N{SNOWMAN}")
    assert sum(len(rows) for rows in module(save(tmp_path / "t.csv", text)).splits.values()) == 40
    message = refusal(save(tmp_path / "t.csv", text.replace("20.5,\N{SNOWMAN}", "20.5")))
    assert "line 22 has 2 cells, but the first line names 3 columns" in message


def test_byte_order_mark_and_other_line_ends_are_accepted(tmp_path: Path) -> None:
    for content in ("\ufeff" + GOOD, GOOD.replace("\n", "\r\n"), GOOD + "\n\n", GOOD[:-1]):
        data = module(save(tmp_path / "t.csv", content), {"z": {"column": "y", "kind": "binary"}}, ignore=["a"])
        assert list(data.spec.inputs) == ["b"]
        assert sum(len(rows) for rows in data.splits.values()) == 40
    assert "its lines end with carriage returns" in refusal(save(tmp_path / "t.csv", GOOD.replace("\n", "\r")))


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (5, "1.5,S", "line 5 has 2 cells, but the first line names 3 columns"),
        (5, "1.5", "line 5 has 1 cells"),
        (5, "", "line 5 has 1 cells"),
        (5, "1.5,S,0,1", "line 5 has 4 cells"),
        (41, "1.5,S,0,", "line 41 has 4 cells"),
        (41, "1.5,S", "line 41 has 2 cells"),
        (5, '1.5,"S,0"', "line 5 has 2 cells"),
        (5, '1.5,"S\nT",0\n1.5', "line 7 has 1 cells"),
        (5, '1.5,"S,0', "line 41: unexpected end of data"),
        (5, '1.5,"S"T,0', "line 5: ',' expected after '\"'"),
    ],
)
def test_lines_with_too_few_or_too_many_cells_are_refused(tmp_path: Path, line: int, text: str, message: str) -> None:
    lines = GOOD.splitlines()
    lines[line - 1] = text
    assert message in refusal(save(tmp_path / "t.csv", "\n".join(lines)))


def test_quoted_separators_quotes_and_line_breaks_belong_to_their_cell(tmp_path: Path) -> None:
    text = GOOD.replace("S", '"S,""x""\nz"')
    data = module(save(tmp_path / "t.csv", text))
    assert sum(len(rows) for rows in data.splits.values()) == 40
    assert data.spec.inputs["b"].size == 3


def test_first_uneven_line_is_named_whatever_the_others_have(tmp_path: Path) -> None:
    chance, path = random.Random(0), tmp_path / "t.csv"
    for _ in range(100):
        lines = ["x,x,x"] * 6
        for _ in range(chance.randrange(4)):  # lines too long may make up for lines too short
            lines[chance.randrange(6)] = ",".join("x" * chance.randrange(2, 5))
        save(path, "\n".join(["a,b,c", *lines]))
        uneven = [number for number, line in enumerate(lines, 2) if line.count(",") != 2]
        if uneven:
            with pytest.raises(InputError, match=f"line {uneven[0]} has "):
                read_table(path, ",", [])
        else:
            assert len(read_table(path, ",", [])) == 6


def test_limit_of_the_csv_module_is_restored(tmp_path: Path) -> None:
    import csv

    limit = csv.field_size_limit()
    text = GOOD.replace("S", '"' + "s" * (limit + 1) + '"', 1)
    assert sum(len(rows) for rows in module(save(tmp_path / "t.csv", text)).splits.values()) == 40
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("keep", [0, 5, 40, -5])
def test_damaged_gzip_files_are_refused(tmp_path: Path, keep: int) -> None:
    path = save(tmp_path / "t.csv.gz", gzip.compress(GOOD.encode())[:keep])
    assert re.search(r"t\.csv\.gz is (empty|damaged or not a gzip file)", refusal(path))
    assert "is damaged or not a gzip file" in refusal(save(path, GOOD))


def test_every_damage_of_a_parquet_file_gives_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    frame, chance = pl.read_csv(GOOD.encode()), random.Random(0)
    content, path = parquet(frame), tmp_path / "t.parquet"
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


INPUTS_ALONE = {  # types of a Parquet file that inputs can have, but labels cannot
    "list": pl.Series([[1], [2]] * 20),
    "array": pl.Series([[1], [2]] * 20, dtype=pl.Array(pl.Int64, 1)),
    "date": pl.Series([date(2020, 1, 1), date(2020, 1, 2)] * 20),
}
UNUSUAL = {  # those that neither can have
    "struct": pl.Series([{"a": 1}, {"a": 2}] * 20),
    "vector": pl.Series([[1.5], [2.5]] * 20),
    "nested": pl.Series([[[1]], [[2]]] * 20),
    "time": pl.Series([1, 2] * 20).cast(pl.Time),
    "duration": pl.Series([1, 2] * 20).cast(pl.Duration),
    "binary": pl.Series([b"a", b"b"] * 20),
}
FITTING = {
    "categorical": pl.Series(["1", "2"] * 20, dtype=pl.Categorical),
    "enum": pl.Series(["1", "2"] * 20, dtype=pl.Enum(["1", "2"])),
    "decimal": pl.Series([Decimal("1.0"), Decimal("2.5")] * 20),
    "boolean": pl.Series([True, False] * 20),
    "int128": pl.Series([1, 2] * 20, dtype=pl.Int128),
    "uint64": pl.Series([1, 2**64 - 1] * 20, dtype=pl.UInt64),
    "float32": pl.Series([1.5, 2.5] * 20, dtype=pl.Float32),
}


@pytest.mark.parametrize("kind", ["binary", "multiclass", "regression"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_labels_and_inputs_of_unusual_types_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    frame = pl.DataFrame({"a": pl.Series(range(40)) + 0.5, "y": UNUSUAL[name], "z": [0, 1] * 20})
    path = save(tmp_path / "t.parquet", parquet(frame))
    assert re.search(r"t\.parquet, column 'y': its type .* is neither text nor", refusal(path, {"y": {"kind": kind}}))
    message = refusal(path, {"z": {"kind": kind}})
    assert re.search(r"column 'y': its type .*data\.ignore=\[y\]$", message)
    assert "column 'y': its type" in refusal(path, {"z": {"kind": kind}}, split_column="y")
    assert len(module(path, {"z": {"kind": kind}}, ignore=["y"]).splits) == 3


@pytest.mark.parametrize("kind", ["binary", "multiclass", "regression"])
@pytest.mark.parametrize("name", INPUTS_ALONE)
def test_labels_of_types_for_inputs_alone_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    frame = pl.DataFrame({"a": pl.Series(range(40)) + 0.5, "y": INPUTS_ALONE[name], "z": [0, 1] * 20})
    path = save(tmp_path / "t.parquet", parquet(frame))
    assert re.search(r"t\.parquet, column 'y': its type .* is neither text nor", refusal(path, {"y": {"kind": kind}}))
    assert "column 'y': its type" in refusal(path, {"z": {"kind": kind}}, split_column="y")
    assert set(module(path, {"z": {"kind": kind}}).spec.inputs) & {"y", "y day"}


@pytest.mark.parametrize("name", FITTING)
def test_labels_and_inputs_of_fitting_types_are_read(tmp_path: Path, name: str) -> None:
    frame = pl.DataFrame({"a": pl.Series(range(40)) + 0.5, "y": FITTING[name], "z": [0, 1, 1, 0] * 10})
    path = save(tmp_path / "t.parquet", parquet(frame))
    for kind in ("binary", "multiclass"):
        assert len(module(path, {"y": {"kind": kind}}).splits["train"].targets["y"].unique()) == 2
    assert {"y", NUMERIC} & set(module(path, {"z": {"kind": "binary"}}).spec.inputs)


def rows_with(value: str, column: str) -> str:
    """Return a table in which row 7 has ``value`` in ``column``."""
    lines = GOOD.splitlines()
    cells = lines[7].split(",")
    cells["aby".index(column)] = value
    lines[7] = ",".join(cells)
    return "\n".join(lines)


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e200", "1e999"])
def test_inputs_whose_statistics_overflow_are_refused_with_their_row(tmp_path: Path, value: str) -> None:
    path = save(tmp_path / "t.csv", rows_with(value, "a"))
    message = refusal(path, val_path=str(path), test_path=str(path))
    assert f"column 'a', row 7: '{value}'" in message


@pytest.mark.parametrize("value", ["1e300", "-1e300", "1e60"])
def test_inputs_of_other_splits_that_overflow_are_refused_with_their_row(tmp_path: Path, value: str) -> None:
    good, other = save(tmp_path / "t.csv", GOOD), save(tmp_path / "u.csv", rows_with(value, "a"))
    message = refusal(good, test_path=str(other))
    assert f"u.csv, column 'a', row 7: '{value}' is too far from the training rows" in message


@pytest.mark.parametrize("value", ["1e308", "-1e39", "1e19"])
def test_labels_of_a_regression_that_overflow_are_refused_with_their_row(tmp_path: Path, value: str) -> None:
    path = save(tmp_path / "t.csv", rows_with(value, "y"))
    message = refusal(path, {"y": {"kind": "regression"}})
    assert f"column 'y', row 7: '{value}' is too large for a label of task 'y'" in message


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1, True, "much", None, [1], 1e30])
def test_unsuitable_weights_are_refused(tmp_path: Path, weight: Any) -> None:
    path = save(tmp_path / "t.csv", GOOD)
    assert "data.tasks.y.weight=" in refusal(path, {"y": {"kind": "binary", "weight": weight}})


@pytest.mark.parametrize(
    "tasks",
    [
        5, "y", ["y"], True, {"y": None}, {"y": []}, {"y": "binary"}, {"y": {}}, {"y": {"kind": None}},
        {"y": {"kind": ["binary"]}}, {"y": {"kind": True}}, {"a/b": {"column": "y", "kind": "binary"}},
        {"a.b": {"column": "y", "kind": "binary"}}, {"": {"column": "y", "kind": "binary"}},
        {1: {"column": "y", "kind": "binary"}}, {True: {"column": "y", "kind": "binary"}},
        {"y": {"kind": "binary", "column": ""}}, {"y": {"kind": "binary", "column": ["y"]}},
        {"y": {"kind": "binary", "column": 5}}, {"y": {"kind": "binary", "column": True}},
        {"y": {"kind": "binary", 5: 1}}, {"y": {"kind": "binary", "positive": ["1"]}},
        {"y": {"kind": "binary", "positive": 7}}, {"y": {"kind": "binary", "positive": True}},
        {"y": {"kind": "binary", "positive": math.nan}}, {"y": {"kind": "binary", "positive": 10**400}},
    ],
)  # fmt: skip
def test_unsuitable_tasks_are_refused(tmp_path: Path, tasks: Any) -> None:
    assert "data.tasks" in refusal(save(tmp_path / "t.csv", GOOD), tasks)


def test_columns_with_numbers_and_unusual_letters_as_names(tmp_path: Path) -> None:
    text = GOOD.replace("a,b,y", "2024,b. [c]/{d} \N{SNOWMAN},1", 1)
    data = module(save(tmp_path / "t.csv", text), {"y": {"kind": "binary", "column": 1, "positive": 0}})
    assert list(data.spec.inputs) == ["b. [c]/{d} \N{SNOWMAN}", NUMERIC]
    assert "data.ignore=[2024]: must be a list of texts" in refusal(tmp_path / "t.csv", ignore=[2024])


def test_empty_columns(tmp_path: Path) -> None:
    text = "a,b,c,y\n" + "".join(f"{i}.5,,NA,{i % 2}\n" for i in range(40))
    path = save(tmp_path / "t.csv", text)
    assert list(module(path).spec.inputs) == [NUMERIC]
    assert "no training row has a label for task 'b'" in refusal(path, {"b": {"kind": "multiclass"}})
    frame = pl.DataFrame({"a": pl.Series(range(40)) + 0.5, "b": [None] * 40, "y": [0, 1] * 20})
    path = save(tmp_path / "t.parquet", parquet(frame))
    assert list(module(path).spec.inputs) == [NUMERIC]
    assert "no training row has a label for task 'b'" in refusal(path, {"b": {"kind": "regression"}})


@pytest.mark.parametrize("separator", ["", "ab", 5, None, True, "\n", '"', "\xe9", "\0", [","]])
def test_unsuitable_separators_are_refused(tmp_path: Path, separator: Any) -> None:
    assert "data.separator=" in refusal(save(tmp_path / "t.csv", GOOD), separator=separator)


@pytest.mark.parametrize("separator", [";", "|", " ", "a", "\t", "."])
def test_file_with_another_separator_gives_one_message(tmp_path: Path, separator: str) -> None:
    refusal(save(tmp_path / "t.csv", GOOD), separator=separator)


def test_split_with_its_own_file_may_have_a_share_of_0(tmp_path: Path) -> None:
    path = save(tmp_path / "t.csv", GOOD)

    def sizes(split: list[float], **files: str) -> list[int]:
        return [len(rows) for rows in module(path, split=split, **files).splits.values()]

    test, val = {"test_path": str(path)}, {"val_path": str(path)}
    for split in ([0.9, 0.1, 0], [0.9, 0.1, 0.0]):
        assert sorted(sizes(split, **test)) == [4, 36, 40]
    assert sizes([1, 0, 0], **test, **val) == [40, 40, 40]  # the same file three times
    assert sizes([0.5, 0.3, 0.2], **test, **val) == [40, 40, 40]  # shares of splits with a file are ignored
    for split, files in (([0.9, 0.1, 0], {}), ([0.9, 0.1, 0], val), ([0, 0.5, 0.5], test), ([1, 0, 0], test)):
        assert "data.split=[" in refusal(path, split=split, **files)


def test_other_file_lacks_columns_or_has_other_types(tmp_path: Path) -> None:
    path = save(tmp_path / "t.csv", GOOD)
    other = save(tmp_path / "u.csv", "b,y\n" + "S,0\n" * 9)
    assert "u.csv lacks columns of" in refusal(path, val_path=str(other))
    frame = pl.DataFrame({"a": [[1.5]] * 9, "b": ["S"] * 9, "y": [0] * 9})
    other = save(tmp_path / "u.parquet", parquet(frame))
    assert "u.parquet, column 'a': its type List" in refusal(path, test_path=str(other))


def test_many_columns_are_not_all_listed(tmp_path: Path) -> None:
    names = [f"column_{i}" for i in range(500)]
    path = save(tmp_path / "t.csv", ",".join(names) + "\n" + ",".join("1" * 500) + "\n")
    assert "has no column 'y'; it has column_0, column_1, " in refusal(path)


def test_column_called_like_the_numeric_input_is_refused(tmp_path: Path) -> None:
    assert "rename the column 'numeric columns'" in refusal(
        save(tmp_path / "t.csv", GOOD.replace("b", "numeric columns", 1))
    )


def test_values_of_a_good_table_are_unchanged(tmp_path: Path) -> None:
    data = module(save(tmp_path / "t.csv", GOOD))
    numbers = torch.cat([rows.inputs[NUMERIC] for rows in data.splits.values()]).flatten().sort().values
    assert torch.allclose(numbers.diff(), numbers.diff()[0].expand(39), rtol=1e-4)
