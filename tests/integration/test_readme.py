"""README from a CSV file to served predictions; the commands of the pages on a run that is there; notebooks."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import polars as pl
import pytest
from mtl.data_modules.tables.example import visits

import mtl
from mtl.cli import columns, report, use
from mtl.pipeline.run import run
from mtl.use.serve import Predictor
from tests.conftest import ROOT
from tests.integration.helpers import compose_small
from tests.pages import blocks, commands


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of README's first run, on some rows of its example."""
    folder = tmp_path_factory.mktemp("trained")
    visits()[:400].write_csv(folder / "visits.csv")
    own = next(words for words in commands("mtl train") if "data.path=visits.csv" in words)
    words = [word for word in own if not word.startswith("hydra.")]
    small = ("recipe.expert_units=[8]", "recipe.embedding_dim=4", "trainer.max_epochs=1", "~logger")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(compose_small(folder / "run", *words, *small))
    return folder / "run"


def test_requests_of_the_pages_are_answered(trained: Path) -> None:
    requests = [json.loads(words[words.index("-d") + 1]) for words in blocks() if words[0] == "curl"]
    with Predictor(mtl.load(trained, device="cpu")) as predictor:
        answers = [predictor.submit(request["rows"]).result(20) for request in requests]
    assert len(answers) > 1
    for [row] in answers:
        assert row.keys() > {"click_class", "minutes_prediction"}


@pytest.mark.usefixtures("few_trees")
def test_lines_of_python_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    visits()[:400].write_csv("visits.csv")
    visits()[400:420].write_csv("new.csv")
    names: dict[str, mtl.TrainedModel] = {}
    exec(block, names)
    assert names["model"].metrics.keys() > {"clicked/auroc", "minutes/mse"}


def test_commands_on_a_run_work(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that predict and report; what a page calls RUN or SWEEP is the run above."""
    monkeypatch.chdir(tmp_path)
    visits()[400:420].drop("clicked", "minutes").write_csv("new.csv")
    for name, main in {"mtl predict": use.predict, "mtl report": report.main}.items():
        for words in commands(name):
            cloud = any("://" in word for word in words)
            if words[0].startswith(("outputs/", "RUN")) and not cloud:
                main([str(trained), *words[1:], *(["--force"] if name == "mtl predict" else [])])
    assert len(pl.read_parquet("predictions.parquet")) == 20
    assert (trained / "report.html").exists()


@pytest.mark.slow
def test_options_that_columns_writes_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mtl columns visits.csv clicked minutes``, then the command below it on the page."""
    monkeypatch.chdir(tmp_path)
    visits()[:400].write_csv("visits.csv")
    columns.main(max(commands("mtl columns"), key=len))
    [words] = [words for words in commands("mtl train") if words[:3] == ["--config-dir", "my_conf", "data=visits"]]
    small = ("recipe.expert_units=[8]", "recipe.embedding_dim=4", "trainer.max_epochs=1")
    run(compose_small(tmp_path / "run", f"hydra.searchpath=[file://{tmp_path}/my_conf]", *words[2:], *small))
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert record["main_metrics"] == {"clicked": "auroc", "minutes": "mse"}


NOTEBOOKS = sorted((ROOT / "docs" / "gallery").glob("*.ipynb"))
EXTRA = {"text": "transformers", "table": "pandas"}  # what a notebook needs that mtl does not


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebook_runs(path: Path, tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip(EXTRA.get(path.stem, "torch"))
    if path.stem == "movielens":
        data = Path(os.environ.get("MTL_DATA_DIR", ROOT / "data"))
        if not (data / "ml-100k").is_dir():
            pytest.skip(f"{data}/ml-100k is not there")
    else:
        data = tiny_data
    monkeypatch.setenv("MTL_DATA_DIR", str(data))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(str(cell.get("outputs", "")) for cell in notebook.cells)
    assert "error: " not in printed  # of a command, whose status a notebook does not look at


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_stored_outputs_are_small_and_whole(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 100_000
    assert '"output_type"' in text
    assert '"output_type": "error"' not in text
    assert "error: " not in text
