"""A run on a table with dates, lists, a text and a bad number: trained, resumed, tested, served and exported."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import torch
from mtl.data_modules.tables.example import visits

import mtl
from mtl.checks import InputError
from mtl.cli.use import export, predict
from mtl.use.serve import Predictor
from mtl.use.trained import TrainedModel
from tests.integration.helpers import train_table

ROWS = 300
WORDS = [
    "data.tasks={click: {column: clicked, kind: binary}, minutes: {kind: regression}}",
    'data.columns={tags: {kind: list, separator: "|"}, comment: text}',
    'data.columns.been={kind: list, separator: "|", target: city}',
    "bottom=cross",
    "data.on_invalid=missing",
    "gate=topk",
    "trainer.max_epochs=2",
]


def table() -> pl.DataFrame:
    number = pl.int_range(ROWS)
    stamp = pl.datetime(2026, 1, 1) + pl.duration(hours=number * 29)
    been = pl.Series(["|".join(["Lyon", "Bergen", "Rome"][i % 3 : i % 5]) for i in range(ROWS)])
    tags = pl.Series(["|".join(["new", "sale", "red", "blue"][i % 3 : i % 5]) for i in range(ROWS)])
    return visits()[:ROWS].with_columns(
        signup=pl.when(number == 7).then(pl.lit("soon")).otherwise(stamp.dt.to_string("%Y-%m-%d %H:%M")),
        tags=tags,
        been=been,
        comment=pl.format(
            "Visit number {} was {}nice!", number, pl.when(number % 3 > 0).then(pl.lit("NOT ")).otherwise(pl.lit(""))
        ),
        age=pl.when(number == 4).then(pl.lit("old")).otherwise(pl.col("age").cast(pl.String)),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_table(tmp_path_factory.mktemp("trained"), table(), *WORDS)


@pytest.fixture(scope="module")
def model(trained: Path) -> TrainedModel:
    return mtl.load(trained / "checkpoints" / "best.ckpt", device="cpu")


def test_server_and_files_give_the_predictions_of_frames(trained: Path, model: TrainedModel, tmp_path: Path) -> None:
    text = table()
    typed = text.with_columns(
        pl.col("signup").str.to_datetime("%Y-%m-%d %H:%M", strict=False), pl.col("tags", "been").str.split("|")
    )
    expected = model.predict(text)
    assert expected.equals(model.predict(typed))
    for suffix in (".csv", ".parquet"):
        (text if suffix == ".csv" else typed).write_parquet(tmp_path / "rows.parquet")
        text.write_csv(tmp_path / "rows.csv")
        out = tmp_path / f"out{suffix}.parquet"
        predict([str(trained / "checkpoints" / "best.ckpt"), str(tmp_path / f"rows{suffix}"), "-o", str(out)])
        assert pl.read_parquet(out).select(expected.columns).equals(expected)
    rows = text[:20].select(model.columns).to_dicts()
    rows[10:] = [{**row, "tags": row["tags"].split("|"), "been": row["been"].split("|")} for row in rows[10:]]
    rows[3] |= {"city": "Atlantis", "been": "Atlantis"}  # unknown to the network
    with Predictor(model, max_wait=0.0) as predictor:
        answers = predictor.submit(rows).result(20)
        for tags in (5, {"a": 1}, [["a"]]):
            with pytest.raises(
                mtl.checks.InputError, match=r"column 'tags', row 1: .* is not a list of texts or numbers"
            ):
                predictor.submit([{**rows[0], "tags": tags}])
    expected = model.predict(pl.DataFrame(rows[:10]))
    for answer, row in zip(answers, expected.to_dicts(), strict=False):
        assert answer == pytest.approx(row, abs=1e-5)


def test_program_gives_the_predictions(
    trained: Path, model: TrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export([str(trained / "checkpoints" / "best.ckpt"), "--out", str(tmp_path)])
    assert "differs from the network by at most" in capsys.readouterr().out
    found = torch.export.load(tmp_path / "model.pt2").module()(model.encode(table()[:9]))
    expected = model.predict(table()[:9])["click_probability"].to_torch()
    torch.testing.assert_close(found["click"].detach(), expected, atol=1e-5, rtol=1e-5)
    described = json.loads((tmp_path / "preprocessing.json").read_text())
    assert described["inputs"]["tags"] == {"shape": ["rows", 4], "dtype": "int64"}
    tags = described["data"]["encoder"]["columns_by_name"]["tags"]
    assert tags["vocabularies"]["tags"]["values"] == ["blue", "new", "red", "sale"]


def test_labels_with_decimal_commas_and_cells_that_count_as_empty(tmp_path: Path) -> None:
    """In the file of the training, in a table of texts and in one of numbers, the labels are the same."""
    number = pl.int_range(ROWS)
    plain = visits()[:ROWS].with_columns(
        minutes=pl.when(number % 9 > 0).then(1000 * pl.col("minutes").round(1)),
        clicked=pl.when(number % 7 > 0).then("clicked"),
    )
    texts = plain.with_columns(
        heavy=pl.lit("0,5"),
        minutes=pl.col("minutes").cast(pl.String).str.replace(".", ",", literal=True).fill_null("n/a"),
        clicked=pl.col("clicked").fill_null("NULL"),
    )
    with pytest.raises(InputError, match=r"'data.columns=\{minutes: \{format: \"1.234,5\"\}\}'"):
        train_table(tmp_path, texts, WORDS[0])
    words = ["data.weight_column=heavy", 'data.columns={minutes: {format: "1.234,5"}, heavy: {format: "1.234,5"}}']
    folder = train_table(tmp_path, texts, WORDS[0], *words)
    model = mtl.load(folder / "checkpoints" / "best.ckpt", device="cpu")
    assert next(task for task in model.spec.tasks if task.name == "minutes").mean == pytest.approx(
        plain["minutes"].mean(), rel=0.1
    )
    found = model.evaluate(texts)
    assert found == pytest.approx(model.evaluate(plain.with_columns(heavy=0.5)))
    assert found["minutes/mse"] > 0
    with pytest.raises(
        InputError, match=r"data.columns.minutes.format=dd/mm/yyyy: the labels of task 'minutes' are no dates"
    ):
        train_table(tmp_path, texts, WORDS[0], "data.columns={minutes: {format: dd/mm/yyyy}}")
