"""``mtl columns``: what it shows and writes is what a run with its options does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from mtl.data_modules.table import TableDataModule
from omegaconf import OmegaConf

from mtl.cli.main import main
from mtl.config.build import build_data
from mtl.config.check import check
from tests.integration.helpers import accepted
from tests.messy import TASKS, messy


def columns(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["columns", *words])
    return capsys.readouterr().out


def written(file: str) -> dict[str, Any]:
    text = Path(file).read_text()
    assert text.startswith("# @package _global_\n")
    content = yaml.safe_load(text)
    assert content["defaults"] == ["table"]
    options: dict[str, Any] = content["data"]
    return options


def test_a_split_by_time_or_by_user_is_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = pl.DataFrame({"user": [row % 40 for row in range(400)], "x": np.arange(400) / 7, "y": [0, 1, 1, 0] * 100})
    frame.write_csv("plain.csv")
    out = columns(capsys, "plain.csv", "y")
    assert "user has 10.0 rows each: to test on new ones, set data.split.by=group 'data.split.column=user'" in out
    assert "dates" not in out
    dated = frame.drop("user").with_columns(day=pl.date(2026, 1, 1) + pl.duration(days=pl.int_range(400)))
    dated.write_csv("dated.csv")
    out = columns(capsys, "dated.csv", "y")
    assert "later rows than those of the training, set data.split.by=time 'data.split.column=day'" in out
    assert "split_by=group" not in out


def test_long_lists_and_molecules_are_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bits = [[row % 211, *range(row % 7, row % 7 + 10)] for row in range(400)]
    lists = {
        "bits": bits,
        "tags": [[row % 211] for row in range(400)],
        "few": [[*range(row % 9, 12)] * 3 for row in range(400)],
    }
    pl.DataFrame({**lists, "SMILES": ["C" * (row % 90) + "O" for row in range(400)], "y": [0, 1] * 200}).write_parquet(
        "t.parquet"
    )
    out = columns(capsys, "t.parquet", "y")
    assert "bits: a list of 211 ids, 11 per row: recipe=fingerprints" in out
    assert out.count("recipe=fingerprints") == 2
    assert "SMILES: if these are molecules, set 'data.columns.SMILES=molecule' recipe=fingerprints (needs rdkit)" in out


def test_labels_with_decimal_commas_or_bad_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    days = [f"{n % 9},{n % 7}" for n in range(100)]
    pl.DataFrame({"x": range(100), "days": [*days[:90], *["n/a"] * 10]}).write_csv("rows.csv")
    columns(capsys, "rows.csv", "days")
    options = written("my_conf/data/rows.yaml")
    assert options["columns"]["days"] == {"format": "1.234,5"}
    assert options["tasks"] == {"days": {"column": "days", "kind": "regression"}}
    assert options["path"] == "rows.csv"
    pl.DataFrame({"x": range(100), "days": [*days[:99], "soon"]}).write_csv("rows.csv")
    with pytest.raises(SystemExit, match=r"column 'days', row 100: 'soon' is not a number as in 1.234,5"):
        main(["columns", "rows.csv", "days", "--force"])


def test_options_teach_what_is_inferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    messy(2_000).write_csv("my orders.csv")
    out = columns(capsys, "my orders.csv", *TASKS)
    assert "Order ID     left out      2,000" in out
    assert max(map(len, out.split("ignored: ")[0].splitlines())) <= 80
    assert out.splitlines()[-1].endswith("--config-dir my_conf data=my_orders")
    options = written("my_conf/data/my_orders.yaml")
    assert options["tasks"] == {name: {"column": name, **task} for name, task in TASKS.items()}
    assert options["ignore"] == ["currency"]  # a constant; what to set for the identifier is advised
    plain = {"path": options["path"], "tasks": TASKS}
    one, other = (TableDataModule(**given, batch_size=32) for given in (options, plain))
    for data in (one, other):
        data.setup()
    assert one.row_encoder is not None
    assert other.row_encoder is not None
    assert one.row_encoder.state() == other.row_encoder.state()
    with pytest.raises(SystemExit, match=r"my_orders.yaml: this file exists; add --force"):
        columns(capsys, "my orders.csv")
    columns(capsys, "my orders.csv", "--force")
    assert list(written("my_conf/data/my_orders.yaml")["tasks"]) == ["spend"]  # the last one


def test_questions_and_parquet_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pl.DataFrame(
        {"day": ["03/04/2024", "05/06/2024"] * 20, "a.b": [0, 1, 1, 0] * 10, "x": [i + 0.5 for i in range(40)]}
    )
    frame.write_parquet(tmp_path / "movielens.parquet")
    out = columns(capsys, str(tmp_path / "movielens.parquet"), "a.b", "-o", str(tmp_path))
    assert "may be written as dd/mm/yyyy or mm/dd/yyyy" in out
    assert out.splitlines()[-1].endswith("data=my_movielens")  # movielens is one of ours
    text = (tmp_path / "data" / "my_movielens.yaml").read_text()
    assert "a_b: {column: a.b, kind: binary}" in text
    assert "# " in text.splitlines()[-1]
    assert "may be written as dd/mm/yyyy or mm/dd/yyyy" in text.splitlines()[-1]
    for words, message in (
        (["day"], "day: constants, dates, lists, identifiers and free text are no labels"),
        (["y"], "has no column 'y'; it has day, a.b, x"),
    ):
        with pytest.raises(SystemExit, match=message):
            columns(capsys, str(tmp_path / "movielens.parquet"), *words, "-o", str(tmp_path / "other"))


NAMES = (
    *("${oc.env:HOME}", "${new_folder:made}", "a.${b}", r"\${x}", r"\\${x}", "???", r"\???", "a: b", "- x", "é", "a=b"),
    *("null", "1e3", ".inf", "1_000", "2024-01-01", "it's", "a #b", "*a", "<<", "~", "yes", "[/b]", "_target_"),
)


def test_names_of_columns_are_never_interpolations_or_other_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ``mtl columns`` writes names the columns of the file, after Hydra composed it and built the data."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    numbers = {name: draw.normal(size=60) for name in NAMES}
    dates = [f"{day % 28 + 1:02}/12/2025" for day in range(60)]
    pl.DataFrame(numbers | {"_target_": dates, "y": [0, 1] * 30}).write_csv("${oc.env:HOME}.csv")
    columns(capsys, "${oc.env:HOME}.csv", "y", "???", "${new_folder:made}")
    cfg = accepted([f"hydra.searchpath=[file://{tmp_path}/my_conf]", "data=oc"])
    for _ in range(2):
        data = build_data(cfg)
        assert {*data.options.named, *data.ignore} == {*NAMES} - {"???", "${new_folder:made}"}
        assert {task.column for task in data.labels} == {"???", "${new_folder:made}", "y"}
        assert data.paths == {"train": Path("${oc.env:HOME}.csv")}
        data.setup()
        OmegaConf.resolve(cfg)  # as a run does
    check(cfg)
    assert not Path("made").exists()


def test_mixed_cells_are_counted_and_what_is_advised_works_beside_the_written_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    days = [f"2024-03-{day:02}" if day % 2 else f"{day:02}.04.2024" for day in range(1, 29)] * 15
    table: dict[str, Any] = {"day": days, "level": [row % 40 for row in range(420)], "y": [0, 1, 1, 0, 1] * 84}
    table |= {"leak": ["ab"[y] for y in table["y"]], "height": [f"{row / 7:.2f}" for row in range(417)] + ["soon"] * 3}
    pl.DataFrame(table).write_csv("t.csv")
    words = " ".join(columns(capsys, "t.csv", "y").split())
    assert "as in dd.mm.yyyy and yyyy-mm-dd" in words
    assert "whole numbers that repeat; also a category" in words
    assert "row 418: 'soon' is not a number, but most of the column is; 3 of 420 cells are not" in words
    assert "Once the cell above is dealt with, train with them:" in words
    found = accepted([f"hydra.searchpath=[file://{tmp_path}/my_conf]", "data=t", "data.ignore=[leak,height]"])
    data = build_data(found)
    data.setup()
    assert sorted(data.row_encoder.columns) == ["day", "level"]


def test_advised_texts_and_categories_are_inputs_beside_the_written_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = np.random.default_rng(0).choice(["good", "bad", "late", "soon", "box", "blue", "tea", "cup"], (200, 12))
    table = {"order_id": [f"A{row}" for row in range(200)], "comment": [" ".join(row) for row in words]}
    pl.DataFrame(table | {"country": "GB", "plan": ["a", "b"] * 100, "y": [0, 1, 1, 0] * 50}).write_csv("t.csv")
    out = " ".join(columns(capsys, "t.csv", "y").split())
    advised = re.findall(r"set '(data\.columns=[^']+)'", out)
    assert sorted(advised) == ["data.columns={comment: text}", "data.columns={order_id: category}"]
    data = build_data(accepted([f"hydra.searchpath=[file://{tmp_path}/my_conf]", "data=t", *advised]))
    data.setup()
    assert {"order_id", "comment", "plan"} == {*data.row_encoder.columns}
