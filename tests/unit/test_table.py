"""A user's table: inferred kinds, statistics from the training rows only, messages about bad tables."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.encoder import NUMERIC

from mtl.checks import InputError
from mtl.types import Categorical, Numeric

CLICK = {"column": "clicked", "kind": "binary"}


def rows(n: int = 200) -> pl.DataFrame:
    """Return a table with ids, text, integers and fractions, labels with gaps, and a split column."""
    return pl.DataFrame(
        {
            "user": [100 + i % 7 for i in range(n)],
            "city": [["Bern", "Ulm", "Rom"][i % 3] for i in range(n)],
            "age": [20.5 + i % 10 for i in range(n)],
            "stamp": [1_000_000 + 13 * i for i in range(n)],
            "clicked": [["no", "yes"][i % 2] for i in range(n)],
            "stars": [None if i % 4 == 0 else 1.0 + i % 5 for i in range(n)],
            "genre": [["pop", "jazz", "rock"][i % 3] for i in range(n)],
            "part": [["train", "train", "val", "test"][i // 5 % 4] for i in range(n)],
        }
    )


def write(frame: pl.DataFrame, path: Path) -> Path:
    frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
    return path


def module(path: Path | str | None, tasks: Any = None, **options: Any) -> TableDataModule:
    data = TableDataModule(
        None if path is None else str(path), {"click": CLICK} if tasks is None else tasks, batch_size=16, **options
    )
    data.prepare_data()
    data.setup()
    return data


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".tsv", ".parquet"])
def test_columns_are_inferred(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        rows().write_parquet(path)
    else:
        rows().write_csv(
            path,
            separator="\t" if suffix == ".tsv" else ",",
            compression="gzip" if suffix == ".csv.gz" else "uncompressed",
        )
    tasks = {
        "click": CLICK,
        "stars": {"kind": "regression", "weight": 0.5},
        "genre": {"kind": "multiclass"},
    }
    data = module(path, tasks, split_column="part")
    assert data.spec.inputs == {"user": Categorical(8), "city": Categorical(4), NUMERIC: Numeric(2)}  # age and stamp
    assert [(t.name, t.kind, t.num_classes, t.weight) for t in data.spec.tasks] == [
        ("click", "binary", 1, 1.0),
        ("stars", "regression", 1, 0.5),
        ("genre", "multiclass", 3, 1.0),
    ]
    assert {name: len(batch) for name, batch in data.splits.items()} == {"train": 100, "val": 50, "test": 50}
    train = data.splits["train"]
    taken = [i for i in range(200) if i // 5 % 4 < 2]
    assert train.targets["click"].tolist() == [float(i % 2) for i in taken]  # no < yes
    stars = torch.tensor([float("nan") if i % 4 == 0 else 1.0 + i % 5 for i in taken])
    assert torch.equal(train.targets["stars"].nan_to_num(-1), stars.nan_to_num(-1))
    assert train.targets["genre"].tolist() == [[1, 0, 2][i % 3] for i in taken]  # jazz, pop, rock
    assert train.inputs["user"].tolist() == [1 + i % 7 for i in taken]
    age = torch.tensor([20.5 + i % 10 for i in taken], dtype=torch.float64)
    assert torch.allclose(train.inputs[NUMERIC][:, 0].double(), (age - age.mean()) / age.std(correction=0), atol=1e-6)


def test_kinds_can_be_given(tmp_path: Path) -> None:
    path = write(rows(), tmp_path / "rows.csv")
    data = module(
        path, categorical=["stamp"], numeric=["user"], ignore=["city", "part", "stars"], split=[0.5, 0.3, 0.2]
    )
    assert data.spec.inputs == {"stamp": Categorical(101), "genre": Categorical(4), NUMERIC: Numeric(2)}
    assert [len(data.splits[name]) for name in ("train", "val", "test")] == [100, 60, 40]


def test_statistics_come_from_the_training_rows_only(tmp_path: Path) -> None:
    train = pl.DataFrame({"city": ["Bern", "Ulm"] * 20, "size": [1.5, 3.5] * 20, "y": [0, 1] * 20})
    test = pl.DataFrame({"city": ["Rom", "Bern", None], "size": [1e6, None, 2.5], "y": [1, 0, None]})
    paths = {name: str(write(test, tmp_path / f"{name}.csv")) for name in ("val", "test")}
    data = module(
        write(train, tmp_path / "a.csv"), {"y": {"kind": "binary"}}, val_path=paths["val"], test_path=paths["test"]
    )
    assert data.spec.inputs == {"city": Categorical(3), NUMERIC: Numeric(1)}
    assert data.splits["test"].inputs["city"].tolist() == [0, 1, 0]  # unknown, Bern, empty: unknown too
    assert data.splits["test"].inputs[NUMERIC].flatten().tolist() == pytest.approx([1e6 - 2.5, 0.0, 0.0])
    assert data.splits["test"].targets["y"].isnan().tolist() == [False, False, True]
    assert torch.equal(data.splits["train"].inputs["city"], torch.tensor([1, 2] * 20))


def test_empty_cells_of_training_rows(tmp_path: Path) -> None:
    frame = pl.DataFrame({"city": ["Bern", None] * 30, "size": [1.5, None, 3.5] * 20, "y": [0, 1] * 30})
    data = module(write(frame, tmp_path / "a.csv"), {"y": {"kind": "binary"}})
    assert data.spec.inputs == {
        "city": Categorical(3),
        NUMERIC: Numeric(2),
    }  # empty: an id, or a marking column
    numeric = torch.cat([batch.inputs[NUMERIC] for batch in data.splits.values()])
    assert torch.equal(numeric[:, 1] == 1, numeric[:, 0] == 0)


def test_rare_categories_share_the_unknown_id(tmp_path: Path) -> None:
    frame = pl.DataFrame({"city": ["Bern"] * 50 + ["Ulm"] * 49 + ["Rom"], "y": [0, 1] * 50, "part": ["train"] * 100})
    frame = pl.concat([frame, frame[:1].with_columns(part=pl.lit("val")), frame[:1].with_columns(part=pl.lit("test"))])
    data = module(write(frame, tmp_path / "a.csv"), {"y": {"kind": "binary"}}, split_column="part", min_count=2)
    assert data.spec.inputs == {"city": Categorical(3)}
    assert data.splits["train"].inputs["city"].tolist() == [1] * 50 + [2] * 49 + [0]


def test_split_by_share_and_by_files(tmp_path: Path) -> None:
    path, other = write(rows(), tmp_path / "a.parquet"), write(rows(30), tmp_path / "b.parquet")
    one, again, third = (module(path, seed=seed) for seed in (0, 0, 1))
    for name in ("train", "val", "test"):
        assert torch.equal(one.splits[name].inputs[NUMERIC], again.splits[name].inputs[NUMERIC])
    assert not torch.equal(one.splits["val"].inputs[NUMERIC], third.splits["val"].inputs[NUMERIC])
    stamps = torch.cat([batch.inputs[NUMERIC][:, 1] for batch in one.splits.values()])
    assert len(stamps.unique()) == 200  # every row in one split
    data = module(path, test_path=str(other))
    assert [len(data.splits[name]) for name in ("train", "val", "test")] == [178, 22, 30]  # 8 to 1


def test_binary_labels(tmp_path: Path) -> None:
    frame = rows().with_columns(flag=pl.col("clicked") == "yes", half=pl.col("user") % 2 + 9)
    path = write(frame, tmp_path / "a.parquet")
    tasks = {
        "flag": {"kind": "binary"},
        "half": {"kind": "binary"},
        "no": {"column": "clicked", "kind": "binary", "positive": "no"},
    }
    targets = module(path, tasks, split_column="part").splits["train"].targets
    assert torch.equal(targets["flag"], 1 - targets["no"])
    assert set(targets["half"].tolist()) == {0.0, 1.0}  # compared as numbers: 9 < 10


def bad(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "tasks", "message"),
    [
        ("", {"y": {"kind": "binary"}}, "bad.csv is empty"),
        ("x,y\n", {"y": {"kind": "binary"}}, "bad.csv has a header but no rows"),
        (
            "x,y\n1,2,3,4\n",
            {"y": {"kind": "binary"}},
            "line 2 has 4 cells, but the first line names 2 columns",
        ),
        (
            "x,y\n1,0\n2,1\n" * 9,
            {"z": {"kind": "binary"}},
            r"data.tasks.z: .*bad.csv has no column 'z'; it has x, y$",
        ),
        (
            "rate,y\n1,0\n2,1\n",
            {"rates": {"kind": "binary"}},
            r"no column 'rates' \(did you mean 'rate'\?\); it has rate, y$",
        ),
        (
            "x,y\n" + "1,1\n" * 20 + "1,four\n",
            {"y": {"kind": "regression"}},
            "'y', row 21: 'four' is not a number",
        ),
        (
            "x,y\n" + "1,1\n" * 20 + "1,inf\n",
            {"y": {"kind": "regression"}},
            "'y', row 21: 'inf' is not a number",
        ),
        ("x,y\n" + "1,yes\n" * 20, {"y": {"kind": "binary"}}, "column 'y': all 1[0-9] labels .* are 'yes'"),
        ("x,y\n" + "1,\n" * 20, {"y": {"kind": "binary"}}, "no training row has a label for task 'y'"),
        (
            "x,y\n" + "1,a\n1,b\n1,c\n" * 20,
            {"y": {"kind": "binary"}},
            "3 different labels, a, b, c; use kind=mul",
        ),
        (
            "x,y\n" + "1,0\n2,1\n" * 20 + "z,1\n",
            {"y": {"kind": "binary"}},
            "column 'x', row 41: 'z' is not a number, but most",
        ),
        ("x,y\n" + "1,0\n1,1\n" * 20, {"y": {"kind": "binary"}}, "every input column is constant"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, tasks: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        module(bad(tmp_path, text), tasks, split=[0.9, 0.05, 0.05])


def test_class_missing_from_the_training_rows(tmp_path: Path) -> None:
    frame = rows().with_columns(genre=pl.when(pl.int_range(200) == 17).then(pl.lit("folk")).otherwise("genre"))
    with pytest.raises(InputError, match=r"row 18: 'folk' is a label of task 'genre' that does not occur"):
        module(write(frame, tmp_path / "a.csv"), {"genre": {"kind": "multiclass"}}, split_column="part")


def test_text_in_a_column_given_as_numeric(tmp_path: Path) -> None:
    path = write(rows(), tmp_path / "a.csv")
    with pytest.raises(InputError, match=r"a.csv, column 'city', row \d+: '(Bern|Ulm|Rom)' is not a number"):
        module(path, numeric=["city"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": None, "tasks": {"a": CLICK}}, "data.path is not given"),
        ({"path": "nowhere.csv"}, "nowhere.csv: no such file"),
        ({"tasks": {}}, "data.tasks is empty"),
        ({"tasks": {"a": 3}}, "data.tasks.a=3: must give column and kind"),
        ({"tasks": {"a": {"kind": "ranking"}}}, "kind=ranking must be one of binary, multiclass, regression"),
        ({"tasks": {"a": {"kind": "binary", "colum": "x"}}}, "unknown option: colum"),
        ({"tasks": {"a": {"kind": "binary", "weight": -1}}}, "weight=-1: must be"),
        ({"tasks": {"a": {"kind": "regression", "positive": 1}}}, "positive=1 is for kind=binary"),
        ({"tasks": {"click": CLICK | {"positive": "maybe"}}}, "positive=maybe; the labels of .* are no, yes"),
        ({"split": [0.5, 0.5]}, "data.split"),
        ({"split_column": "part", "test_path": "x.csv"}, "one or the other"),
        ({"split_column": "city"}, "column 'city', row 1: 'Bern'; accepted are train, val, test"),
        ({"numeric": ["clicked"]}, "also named as an input"),
        ({"categorical": ["user"], "ignore": ["user"]}, "user is named more than once"),
        ({"categorical": ["usr"]}, r"data.categorical: .* has no column 'usr' \(did you mean 'user'"),
        ({"min_count": 0}, "data.min_count=0"),
        ({"separator": ""}, "data.separator"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write(rows(), tmp_path / "rows.csv")
    with pytest.raises(InputError, match=message):
        module(**{"path": path, "tasks": None} | options)


def test_unsuitable_files(tmp_path: Path) -> None:
    path = write(rows(), tmp_path / "rows.csv")
    with pytest.raises(InputError, match=r"b.csv lacks columns of .*rows.csv: city, age"):
        module(path, test_path=str(write(rows().drop("city", "age"), tmp_path / "b.csv")))
    damaged = tmp_path / "c.parquet"
    damaged.write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"cannot read .*c.parquet"):
        module(damaged)
    sheet = tmp_path / "d.xlsx"
    sheet.write_bytes(b"x")
    with pytest.raises(InputError, match=r"accepted formats are .csv, .csv.gz, .tsv, .parquet"):
        module(sheet)
    dated = rows().with_columns(day=pl.lit(date(2020, 1, 1)))
    dated = dated.with_columns(day=pl.col("day") + pl.duration(days=pl.int_range(200)) - pl.lit(date(2020, 1, 1)))
    with pytest.raises(
        InputError, match=r"column 'day': its type Duration.* is neither text nor number, .*data.ignore=\[day\]"
    ):
        module(write(dated, tmp_path / "e.parquet"))


def test_regressions_are_standardised_by_the_training_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    price = pl.when(pl.col("part") == "train").then(pl.int_range(200) * 1000.0).otherwise(1e6)
    path = write(rows().with_columns(price=price), tmp_path / "a.csv")
    data = module(path, {"price": {"kind": "regression"}}, split_column="part")
    [task], target = data.spec.tasks, data.splits["train"].targets["price"]
    assert (task.mean, task.std) == pytest.approx((float(target.mean()), float(target.std(correction=0))))
    assert (data.splits["val"].targets["price"] == 1e6).all()  # in the units of the column
    assert "divide the column" not in caplog.text
    data = module(path, {"price": {"kind": "regression", "standardise": False}}, split_column="part")
    assert (data.spec.tasks[0].mean, data.spec.tasks[0].std) == (0, 1)
    assert "divide the column" in caplog.text


def test_constant_labels_have_a_standard_deviation_of_one(tmp_path: Path) -> None:
    data = module(write(rows().with_columns(price=pl.lit(0.1)), tmp_path / "a.csv"), {"price": {"kind": "regression"}})
    assert (data.spec.tasks[0].mean, data.spec.tasks[0].std) == (pytest.approx(0.1), 1)


def test_example_is_served_if_no_table_is_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = TableDataModule(data_dir=str(tmp_path), batch_size=16)
    data.prepare_data()
    data.setup()
    assert "made-up rows" in caplog.text
    assert {name: len(batch) for name, batch in data.splits.items()} == {"train": 16000, "val": 2000, "test": 2000}
    assert set(data.spec.inputs) == {"user", "city", "age", "hour", "device"}
    train = data.splits["train"].targets
    assert torch.equal(train["click"] == 0, train["minutes"].isnan())
    written = (tmp_path / "example_visits.csv").read_bytes()
    (tmp_path / "example_visits.csv").unlink()
    data.prepare_data()
    assert (tmp_path / "example_visits.csv").read_bytes() == written


def test_nan_of_a_parquet_file_is_an_empty_cell(tmp_path: Path) -> None:
    nan = float("nan")
    frame = pl.DataFrame({"size": [1.5, nan, 3.5, None] * 20, "y": [0.0, 1.0, 1.0, nan] * 20})
    data = module(write(frame, tmp_path / "a.parquet"), {"y": {"kind": "binary"}}, numeric=["size"])
    assert data.spec.inputs == {NUMERIC: Numeric(2)}
    batch = data.splits["train"]
    assert batch.inputs[NUMERIC].isfinite().all()
    assert 0 < int(batch.targets["y"].isnan().sum()) < len(batch)
