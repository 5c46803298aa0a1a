"""A table that is a folder or a pattern of files is the table of all their rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules.state import changes, fingerprints
from mtl.data_modules.table import TableDataModule

from mtl.checks import InputError


def rows() -> pl.DataFrame:
    number = pl.int_range(80, eager=True)
    return pl.DataFrame({"x": number + 0.5, "city": [f"c{i % 6}" for i in range(80)], "y": number // 2 % 2})


def write(frame: pl.DataFrame, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
    return path


def split_up(frame: pl.DataFrame, folder: Path, suffix: str) -> Path:
    for part in range(4):
        write(frame[20 * part : 20 * (part + 1)], folder / f"part-{part}{suffix}")
    return folder


def module(path: Path | str, **options: Any) -> TableDataModule:
    data = TableDataModule(str(path), {"y": {"kind": "binary"}}, batch_size=8, **options)
    data.prepare_data()
    data.setup()
    return data


def refusal(path: Path | str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        module(path, **options)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_rows_are_those_of_one_file(suffix: str, tmp_path: Path) -> None:
    expected = module(write(rows(), tmp_path / f"all{suffix}"))
    folder = split_up(rows(), tmp_path / "parts", suffix)
    write(rows(), folder / f".hidden{suffix}")
    (folder / "_SUCCESS").touch()
    for path in (folder, f"{folder}/*{suffix}", f"{tmp_path}/p*s/part-?{suffix}", f"{tmp_path}/**/part-[0-3]{suffix}"):
        data = module(path)
        assert data.spec == expected.spec
        for split, batch in expected.splits.items():
            assert all(torch.equal(data.splits[split].inputs[name], batch.inputs[name]) for name in batch.inputs)
            assert torch.equal(data.splits[split].targets["y"], batch.targets["y"])
        assert data.row_encoder.state() == expected.row_encoder.state()


def test_messages_name_the_file_and_its_row(tmp_path: Path) -> None:
    cells = rows().with_columns(x=pl.col("x").cast(pl.String).replace("46.5", "many"))
    folder = split_up(cells, tmp_path / "parts", ".csv")
    assert f"{folder}/part-2.csv, column 'x', row 7: 'many' is not a number" in refusal(folder)
    assert f"{folder}/part-2.csv, column 'x', row 7: 'many'" in refusal(f"{folder}/*.csv", numeric=["x"])
    cells = rows().with_columns(y=pl.col("y").cast(pl.String).replace_strict({"0": "no", "1": "yes"}))
    other = split_up(
        cells.with_columns(y=pl.when(pl.col("x") == 25.5).then(pl.lit("?")).otherwise("y")), tmp_path, ".csv"
    )
    path = write(cells, tmp_path / "all.tsv.csv")
    assert f"{other}/part-1.csv, column 'y', row 6: '?' is a label of task 'y' that does not" in refusal(
        path, test_path=f"{other}/part-*.csv"
    )


def test_files_with_different_columns_are_one_message(tmp_path: Path) -> None:
    folder = split_up(rows(), tmp_path / "parts", ".parquet")
    write(rows().drop("city"), folder / "part-1.parquet")
    write(rows().with_columns(x=pl.lit("1"), z=0), folder / "part-2.parquet")
    write(rows().cast({"y": pl.Int8}).select("y", "city", "x"), folder / "part-3.parquet")  # which fits
    assert refusal(folder) == (
        f"data.path={folder}: its files differ: compared with part-0.parquet, part-1.parquet lacks city; "
        "part-2.parquet also has z; part-2.parquet has String in column x, not Float64"
    )
    for part in (1, 2):
        (folder / f"part-{part}.parquet").unlink()
    data = module(folder)
    assert sum(map(len, data.splits.values())) == 100
    assert data.row_encoder.columns == ["city", "x"]


def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert f"data.path={tmp_path}/empty is a folder without tables (.csv" in refusal(tmp_path / "empty")
    assert f"data.path={tmp_path}/*.csv: no file matches this pattern" in refusal(f"{tmp_path}/*.csv")
    folder = split_up(rows(), tmp_path / "parts", ".csv")
    write(rows(), folder / "b.parquet")
    assert f"data.path={folder}: .csv and .parquet files: give a pattern" in refusal(folder)
    (folder / "b.parquet").unlink()
    (folder / "sub.csv").mkdir()
    assert f"data.path={folder}/sub.csv is a folder" in refusal(folder)


def test_fingerprint_covers_all_files(tmp_path: Path) -> None:
    folder = split_up(rows(), tmp_path / "parts", ".csv")
    path = folder / "*.csv"
    before = fingerprints({"data.path": path})
    assert before["data.path"]["files"] == 4
    assert before["data.path"]["size"] == sum(file.stat().st_size for file in folder.iterdir())
    assert before == fingerprints({"data.path": path})
    assert before["data.path"]["sha256"] == fingerprints({"data.path": folder})["data.path"]["sha256"]
    third = folder / "part-2.csv"
    text = third.read_text()
    for change, message in {
        "content": "other content in the same",
        "name": "other content in the same",
        "count": r"3 files, before 4; it has [\d,]+ bytes, had",
    }.items():
        if change == "content":
            third.write_text(text.replace("c1", "c2"))
        elif change == "name":
            third.write_text(text)
            third.rename(folder / "part-9.csv")
        else:
            (folder / "part-9.csv").unlink()
        found = changes(before, fingerprints({"data.path": path}), {"data.path": path})
        assert re.search(rf"data.path=.*/parts/\*\.csv has changed \({message}", found["data.path"]), change
