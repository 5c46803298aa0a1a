"""A trained model on new rows: from its checkpoint alone, and by testing it on other files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import polars as pl
import pytest
import torch
from mtl.data_modules.tables import row_source
from mtl.data_modules.tables.example import visits
from polars.testing import assert_frame_equal

import mtl
from mtl.checkpoints.files import read
from mtl.checks import InputError
from mtl.cli import use
from mtl.config import build
from mtl.files import formatting
from mtl.files.run_files import read_json
from mtl.pipeline.run import run
from mtl.use import predict
from tests.conftest import ROOT
from tests.disks import largest_file
from tests.glue_files import TINY, write_glue
from tests.integration.helpers import compose_small, resume_small
from tests.programs import attempt

ROWS = 400
WORDS = ["recipe.embedding_dim=4", "recipe.expert_units=[8]", "recipe.head_units=[8]", "~logger"]
WORDS += ["trainer.max_epochs=1", "gate=topk", "data=table"]
TASKS = "{click: {column: clicked, kind: binary}, minutes: {kind: regression}, genre: {kind: multiclass}}"


def table() -> pl.DataFrame:
    """Return rows with three tasks; the category "Oslo" and an empty age occur in the first rows."""
    genre = pl.Series([["pop", "jazz", "rock"][number % 3] for number in range(ROWS)])
    first = pl.int_range(ROWS) < 40
    return visits()[:ROWS].with_columns(
        genre=genre,
        city=pl.when(first).then(pl.lit("Oslo")).otherwise("city"),
        age=pl.when(first).then(None).otherwise("age"),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on ``rows.csv`` beside it; nobody may change either."""
    folder = tmp_path_factory.mktemp("trained")
    table().write_csv(folder / "rows.csv")
    run(compose_small(folder / "run", *WORDS, f"data.path={folder}/rows.csv", f"data.tasks={TASKS}"))
    return folder / "run"


def best(folder: Path) -> Path:
    return folder / "checkpoints" / "best.ckpt"


def evaluated(checkpoint: Path, folder: Path, *words: str) -> dict[str, float]:
    """Return what ``evaluate=checkpoint`` with ``words`` measures."""
    run(resume_small(checkpoint, folder, *words, evaluate=True))
    results: dict[str, float] = json.loads((folder / "results.json").read_text())["numbers"]["test"]["network"]
    return results


@pytest.fixture(scope="module")
def expected(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return what a test on the file of the training measures."""
    return evaluated(best(trained), tmp_path_factory.mktemp("expected"))


def test_state_is_plain_data(trained: Path) -> None:
    state = read(best(trained))["data"]
    assert json.loads(json.dumps(state)) == state
    assert state["rows"] == {"train": 320, "val": 40, "test": 40}
    city, age = (state["encoder"]["columns_by_name"][name] for name in ("city", "age"))
    assert city["vocabularies"]["city"]["values"] == ["Bergen", "Cork", "Lyon", "Oslo", "Porto", "Turku"]
    assert age["scales"]["age"]["gaps"] is True
    assert state["files"]["data.path"]["size"] == (trained.parent / "rows.csv").stat().st_size
    assert [task["classes"] for task in state["spec"]["tasks"]] == [["no", "yes"], [], ["jazz", "pop", "rock"]]


def test_model_needs_its_checkpoint_alone(trained: Path, tmp_path: Path) -> None:
    alone = tmp_path / "model.ckpt"
    shutil.copy(best(trained), alone)
    model = mtl.load(alone, device="cpu")
    assert set(model.columns) == {"user", "city", "age", "hour", "device"}
    assert not model.network.training
    found = model.predict(table(), batch_size=150)
    inputs = model.encode(table())
    with torch.no_grad():
        raw = model.network(inputs).predictions
    minutes = model.spec.tasks[1]
    assert minutes.std > 1
    torch.testing.assert_close(torch.tensor(found["click_probability"].to_list()), raw["click"].sigmoid())
    torch.testing.assert_close(found["minutes_prediction"].to_torch(), minutes.unstandardize(raw["minutes"]))
    names = [f"genre_probability_{name}" for name in ("jazz", "pop", "rock")]
    torch.testing.assert_close(torch.from_numpy(found.select(names).to_numpy(writable=True)), raw["genre"].softmax(-1))
    assert found["click_class"].to_list() == ["yes" if value > 0 else "no" for value in raw["click"].tolist()]
    assert found["genre_class"].to_list() == [("jazz", "pop", "rock")[i] for i in raw["genre"].argmax(-1).tolist()]
    assert model.predict(inputs).equals(model.predict(table()))  # tensors are taken as well


def test_rows_become_the_inputs_of_the_training(trained: Path, tmp_path: Path) -> None:
    """Columns in another order, further columns, rows in another order, typed cells, unknown categories."""
    model, rows = mtl.load(best(trained), device="cpu"), table()
    expected = model.predict(rows)
    assert_frame_equal(model.predict(rows.select(reversed(rows.columns)).with_columns(more=pl.lit("x"))), expected)
    assert_frame_equal(model.predict(rows.select(model.columns).reverse()), expected.reverse())
    assert_frame_equal(model.predict(rows.cast(pl.String).fill_null("NA")), expected)  # as a text file has it
    for row in (rows[50].to_dict(as_series=False), {name: rows[name][50] for name in model.columns}):
        assert_frame_equal(model.predict(row), expected[50])
    strange = rows[:2].with_columns(city=pl.Series(["Atlantis", None]))
    assert model.encode(strange)["city"].tolist() == [0, 0]
    assert model.predict(rows.clear()).height == 0
    assert model.predict(rows.clear()).columns == expected.columns


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (table().drop("age"), r"^the table has no column 'age', which the network reads; it has user, city, hour, .*$"),
        (table().rename({"age": "Age"}), r"no column 'age' \(did you mean 'Age'\?\)"),
        (table().with_columns(age=pl.lit("old")), r"^the table, column 'age', row 1: 'old' is not a number"),
        (table().with_columns(age=pl.lit([1])), r"column 'age': its type List\(Int\d+\) is neither text nor number"),
        ({"age": [1, 2], "city": ["a"]}, r"^the given columns are no table"),
        ({"city": torch.zeros(1)}, r"^the inputs lack .*; this network reads user \(Categorical\)"),
    ],
)
def test_rows_that_do_not_fit(rows: object, message: str, trained: Path) -> None:
    with pytest.raises(InputError, match=message):
        mtl.load(best(trained), device="cpu").predict(rows)


def test_experts_of_each_row(trained: Path) -> None:
    model, rows = mtl.load(best(trained), device="cpu"), table()
    found = model.routing(rows, batch_size=150)
    assert found.columns == ["row", "layer", "task", "expert", "weight"]
    with torch.no_grad():
        weights = model.network(model.encode(rows)).routings["mixture"].weights
    dense = torch.zeros_like(weights)
    task = found["task"].replace_strict({"click": 0, "minutes": 1, "genre": 2}, return_dtype=pl.Int64)
    dense[found["row"].to_list(), task.to_list(), found["expert"].to_list()] = torch.tensor(found["weight"].to_list())
    torch.testing.assert_close(dense, weights)
    assert len(found) == int((weights > 0).sum())  # two experts a row and task
    format_cell = model.predict(rows[:1], tasks=["minutes"], experts=True)
    first = weights[0, 1].sort(descending=True)
    pairs = zip(first.indices[:2].tolist(), first.values[:2].tolist(), strict=True)
    assert format_cell["minutes_experts"][0] == " ".join(f"{expert}:{weight:.3g}" for expert, weight in pairs)
    assert format_cell.columns == ["minutes_prediction", "minutes_experts"]
    with pytest.raises(InputError, match=r"no task 'speed'; the tasks are click, minutes, genre"):
        model.predict(rows, tasks=["speed"])


class TestCommand:
    """``mtl predict``."""

    @pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
    def test_file_of_predictions(
        self, suffix: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        monkeypatch.setattr(row_source, "BLOCK_ROWS", 50)
        out = tmp_path / f"out{suffix}"
        words = [str(best(trained)), str(trained.parent / "rows.csv"), "-o", str(out), "--keep", "user,city"]
        use.predict([*words, "--experts", "--device", "cpu"])
        assert f"{out}: predictions for 400 rows" in capsys.readouterr().out
        separator = "\t" if suffix == ".tsv" else ","
        found = pl.read_parquet(out) if suffix == ".parquet" else pl.read_csv(out, separator=separator)
        expected = mtl.load(best(trained), device="cpu").predict(table(), experts=True)
        kept = table().select(pl.col("user").cast(found["user"].dtype), "city")
        assert_frame_equal(found, kept.hstack(expected), check_dtypes=False, abs_tol=1e-5)
        assert [path.name for path in tmp_path.iterdir()] == [out.name]

    def test_first_rows_on_the_console(self, trained: Path, capsys: pytest.CaptureFixture) -> None:
        use.predict([str(best(trained)), str(trained.parent / "rows.csv"), "--tasks", "click", "--keep", ""])
        printed = capsys.readouterr().out
        assert "click_probability" in printed
        assert "add -o FILE" in printed
        assert "genre" not in printed

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["-o", "{0}/out.txt"], r"-o .*out.txt: accepted formats are .csv, .tsv, .parquet"),
            (["-o", "{0}/there.csv"], r"there.csv: this file exists; give another name, or --force"),
            (["-o", "{0}/rows.csv", "--force"], r"this is the file of the rows"),
            (["-o", "{0}/out.csv", "--tasks", "speed"], r"no task 'speed'; the tasks are click, minutes, genre"),
            (["-o", "{0}/out.csv", "--keep", "name"], r"--keep: .*rows.csv has no column name; it has user, city"),
            (["-o", "{0}/out.csv"], r"rows.csv, column 'age', row 301: 'old' is not a number"),
        ],
    )
    def test_mistakes_are_one_message(
        self, words: list[str], message: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is left behind, and a file that is there stays as it was."""
        monkeypatch.setattr(row_source, "BLOCK_ROWS", 50)
        rows = table().with_columns(pl.col("age").cast(pl.String))
        rows = rows.with_columns(age=pl.when(pl.int_range(ROWS) == 300).then(pl.lit("old")).otherwise("age"))
        rows.write_csv(tmp_path / "rows.csv")
        (tmp_path / "there.csv").write_text("mine")
        given = [word.format(tmp_path) for word in words]
        with pytest.raises(SystemExit, match=rf"^error: .*{message}"):
            use.predict([str(best(trained)), str(tmp_path / "rows.csv"), *given])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "there.csv"]
        assert (tmp_path / "there.csv").read_text() == "mine"


def test_lists_do_not_fit_into_csv(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="column tags holds lists: write"):  # noqa: SIM117
        with predict.table_file(tmp_path / "out.csv") as write:
            write(pl.DataFrame({"tags": [["a"]]}))
    assert not list(tmp_path.iterdir())


# Of Parquet, the parts fail, or the file of all of them
@pytest.mark.parametrize(("suffix", "limit"), [("csv", 3_000), ("parquet", 30_000)])
def test_full_disk_is_one_message_and_keeps_the_previous_file(
    suffix: str, limit: int, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_source, "BLOCK_ROWS", 500)
    rows = pl.concat([table()] * 8).with_columns(own=pl.int_range(8 * ROWS).hash().cast(pl.String))
    rows.write_csv(tmp_path / "rows.csv")
    out = tmp_path / f"out.{suffix}"
    out.write_text("old")
    message = rf"^error: .*/out.{suffix} cannot be written: file too large; the previous .* is intact$"
    with largest_file(limit), pytest.raises(SystemExit, match=message):
        use.predict([str(best(trained)), str(tmp_path / "rows.csv"), "-o", str(out), "--force"])
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, "rows.csv"]


def test_predictions_of_a_trainer(trained: Path, tmp_path: Path) -> None:
    """``trainer.predict`` serves the rows of the test."""
    cfg = resume_small(best(trained), tmp_path, evaluate=True)
    data, trainer = build.build_data(cfg), build.build_trainer(cfg)
    data.load_state_dict(read(best(trained))["data"], test_only=True)
    data.setup()
    model = mtl.load(best(trained), device="cpu")
    module = build.build_module(cfg, model.network, data.spec)
    [found] = trainer.predict(module, datamodule=data)
    expected = model.predict(data.splits["test"].inputs)
    torch.testing.assert_close(found["click"], torch.tensor(expected["click_probability"].to_list()))
    assert {name: len(value) for name, value in found.items()} == {"click": 40, "minutes": 40, "genre": 40}


def test_texts(tmp_path: Path) -> None:
    """Tasks read different columns; of a network that routes tokens, the weights of a row are means over its tokens."""
    write_glue(tmp_path / "data" / "glue", {"rte": 16, "sst2": 16})
    words = [*TINY, "data.tasks=[rte,sst2]", f"paths.data_dir={tmp_path}/data", "trainer.max_epochs=1", "~logger"]
    run(compose_small(tmp_path / "run", *words, "gate=task_top1"))
    shutil.rmtree(tmp_path / "data")
    model = mtl.load(best(tmp_path / "run"), device="cpu")
    assert model.columns == ["sentence1", "sentence2", "sentence"]
    rows = pl.DataFrame({"sentence": ["the cat sees a dog", "", None], "sentence1": ["a", "b", "c"]})
    found = model.predict(rows, tasks=["sst2"], batch_size=2, experts=True)
    assert list(found.columns[:2]) == ["sst2_class", "sst2_probability"]
    assert found.columns[2:] == [f"sst2_experts_layers.{layer}.mixture" for layer in (0, 1)]
    assert found["sst2_class"].is_in(["0", "1"]).all()
    with pytest.raises(InputError, match=r"no column 'sentence2' .*, which task 'rte' reads; it has sentence, "):
        model.predict(rows)
    used = (
        model.routing(rows.with_columns(sentence2=pl.lit("d"))).group_by("row", "layer", "task").agg(pl.sum("weight"))
    )
    assert len(used) == 3 * 2 * 2
    assert used["weight"].is_between(0, 1.001).all()


def test_block_of_the_page(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/in_use.md").read_text(), flags=re.DOTALL)
    (tmp_path / "RUN").symlink_to(trained)
    table().write_csv(tmp_path / "new.csv")
    monkeypatch.chdir(tmp_path)
    names: dict[str, pl.DataFrame] = {}
    exec(block, names)
    assert {"click_class", "click_probability", "minutes_prediction"} <= set(names["found"].columns)
    assert names["used"]["weight"].sum() == pytest.approx(3)  # of three tasks


class TestOtherFiles:
    """``evaluate=`` and ``ckpt=`` with a file that moved, changed, or is new."""

    def test_moved_file(
        self, trained: Path, expected: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        shutil.copy(trained.parent / "rows.csv", tmp_path / "moved.csv")
        assert evaluated(best(trained), tmp_path / "a", f"data.path={tmp_path}/moved.csv") == expected
        assert "since the training" not in caplog.text

    def test_new_test_file(
        self, trained: Path, expected: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The same rows as the split's, with other columns and in another order, give the same numbers."""
        rows = table()
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).tolist()
        part = rows[sorted(order[360:])]
        part.select(reversed(rows.columns)).with_columns(more=pl.lit(1)).reverse().write_csv(tmp_path / "new.csv")
        found = evaluated(best(trained), tmp_path / "a", f"data.test_path={tmp_path}/new.csv")
        assert found == pytest.approx(expected, rel=1e-5)
        assert "since the training" not in caplog.text

    def test_command_names_no_data(self, trained: Path, tmp_path: Path) -> None:
        """Hydra learns from the checkpoint which options its data have."""
        table().write_csv(tmp_path / "new.csv")
        words = [f"evaluate={best(trained)}", f"data.test_path={tmp_path}/new.csv", f"hydra.run.dir={tmp_path}/run"]
        done = attempt(words, tmp_path, small=False)
        assert done.status == 0, done.output
        assert (tmp_path / "run" / "results.json").is_file()

    def test_new_test_file_needs_no_training_file(self, trained: Path, tmp_path: Path) -> None:
        table().write_parquet(tmp_path / "new.parquet")
        words = [f"data.test_path={tmp_path}/new.parquet", f"data.path={tmp_path}/gone.csv"]
        assert evaluated(best(trained), tmp_path / "a", *words)["loss"] > 0

    def test_new_test_file_of_a_run_that_was_split_by_a_column(self, tmp_path: Path) -> None:
        rows = table().with_columns(part=pl.Series([["train", "test", "val", "train"][n % 4] for n in range(ROWS)]))
        rows.write_csv(tmp_path / "rows.csv")
        rows.filter(part="test").drop("part").write_csv(tmp_path / "new.csv")
        words = [
            f"data.path={tmp_path}/rows.csv",
            f"data.tasks={TASKS}",
            "data.split.by=column",
            "data.split.column=part",
        ]
        run(compose_small(tmp_path / "run", *WORDS, *words))
        known = read_json(tmp_path / "run" / "results.json")["numbers"]["test"]["network"]
        found = evaluated(best(tmp_path / "run"), tmp_path / "a", f"data.test_path={tmp_path}/new.csv")
        assert found == pytest.approx(known, rel=1e-5)

    def test_file_that_changed(self, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A test gives a warning, and uses the vocabularies of the training; a resumed run is refused or accepts it."""
        shutil.copytree(trained, tmp_path / "run")
        last = tmp_path / "run" / "checkpoints" / "last.ckpt"
        table()[:-20].with_columns(city=pl.lit("Rome")).write_csv(tmp_path / "rows.csv")
        words = [f"data.path={tmp_path}/rows.csv"]
        evaluated(best(trained), tmp_path / "a", *words)
        assert "rows.csv has changed (" in caplog.text
        assert "rows that the network was trained on may be among" in caplog.text
        go_on = [*words, "trainer.max_epochs=2"]
        with pytest.raises(
            InputError, match=r"data.path=.*rows.csv has changed \(.* bytes in 1 files, before .*\) since the ch"
        ):
            run(resume_small(last, tmp_path / "run", *go_on))
        run(resume_small(last, tmp_path / "run", *go_on, "on_data_change=accept"))
        state = read(last)["data"]
        assert state["encoder"] == read(best(trained))["data"]["encoder"]
        assert state["files"]["data.path"]["size"] == (tmp_path / "rows.csv").stat().st_size

    def test_other_split_of_a_resumed_run(self, trained: Path, tmp_path: Path) -> None:
        last = trained / "checkpoints" / "last.ckpt"
        with pytest.raises(InputError, match=r"data.test_path=.*rows.csv was not given"):
            run(resume_small(last, tmp_path, f"data.test_path={trained.parent}/rows.csv"))
        with pytest.raises(InputError, match=r"configuration: data.vocabulary.min_count .* Leave these options out"):
            resume_small(last, tmp_path, "data.vocabulary.min_count=2")


def test_predictions_wider_than_the_console_are_shown_row_by_row(capsys: pytest.CaptureFixture[str]) -> None:
    table = pl.DataFrame({f"column_{number}": [0.123456, None] for number in range(20)} | {"[b]": ["x", "y"]})
    predict.show(table, 80)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 22
    assert lines[:3] == ["row 1", "  column_0   0.1235", "  column_1   0.1235"]
    assert lines[21:23] == ["  [b]        x", "row 2"]
    predict.show(table[:, -2:], 80)
    printed = capsys.readouterr().out
    assert "row 1" not in printed
    assert "[b]" in printed
    predict.show(pl.DataFrame({"a\x1b[31m": ["\x1b[2J"]}), 80)
    assert capsys.readouterr().out.count(r"\x1b[") == 2
    assert [*map(formatting.cell, (1700000007.132, 10000000.53, 0.5))] == ["1700000007", "10000000.53", "0.5"]
