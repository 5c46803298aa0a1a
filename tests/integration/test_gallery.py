"""The notebooks of docs/gallery run as they stand, and what is stored with them is small."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

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
