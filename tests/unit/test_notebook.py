"""A trained model in a notebook: its metrics as HTML, the page of its run, plots."""

from __future__ import annotations

import gc
from copy import copy
from pathlib import Path
from typing import Any

import matplotlib as mpl
import polars as pl
import pytest

import mtl
from mtl.checks import InputError
from tests.unit.test_fit import QUICK, as_pandas, visits

mpl.use("Agg")
TASKS = {"<b>clicked": {"kind": "binary", "column": "clicked"}, "minutes": "regression"}


@pytest.fixture(scope="module")
def model() -> Any:
    return mtl.fit(as_pandas(visits()), TASKS, gate="comet", **QUICK | {"logger": "csv"})


def test_notebook_shows_metrics_and_experts(model: Any) -> None:
    html = model._repr_html_()
    assert "&lt;b&gt;clicked" in html
    assert "<b>clicked" not in html
    assert "expert_00" in html
    assert f"{model.metrics['minutes/mae']:.4f}" in html
    assert type(model.metrics_table()).__module__.startswith("pandas")


def test_page_has_rows_if_they_are_given_again(model: Any, tmp_path: Path) -> None:
    shown = model.report(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "they were in memory" in text
    assert 'sandbox="allow-scripts" srcdoc="&lt;!' in shown._repr_html_()  # not of the notebook's origin
    assert "Largest errors" in model.report(rows=as_pandas(visits())).html
    assert "Largest errors" in model.report().html  # the page that is there
    with pytest.raises(InputError, match="trained on others"):
        model.report(rows=visits(seed=5))


@pytest.mark.parametrize(("kind", "panels"), [("losses", 2), ("reliability", 1), ("experts", 1), ("importance", 2)])
def test_plots_return_axes(model: Any, kind: str, panels: int) -> None:
    axes = model.plot(kind, visits() if kind == "importance" else None)
    assert len(axes) == panels
    assert all(panel.lines or panel.images or panel.patches for panel in axes)


def test_reliability_of_other_rows(model: Any) -> None:
    rows = visits(300, seed=1)
    [axes] = model.plot("reliability", rows)
    drawn = axes.lines[0].get_xdata()
    labelled = rows.filter(pl.col("clicked").is_not_null())
    probability = model.predict(labelled)["<b>clicked_probability"].sort()
    assert drawn[0] == pytest.approx(probability[: -(-len(probability) // 10)].mean(), abs=1e-6)


def test_files_last_as_long_as_the_model(tmp_path: Path) -> None:
    trained = mtl.fit(visits(), TASKS, **QUICK | {"logger": "csv"})
    folder = trained.folder
    assert folder.is_dir()
    assert not list(folder.glob("checkpoints/last*"))
    trained.save(tmp_path / "model.ckpt")
    again = copy(trained)
    del trained
    gc.collect()
    assert folder.is_dir()
    del again
    gc.collect()
    assert not folder.exists()
    with pytest.raises(InputError, match="folder of this model's run is not there"):
        mtl.load(tmp_path / "model.ckpt").plot("losses")


def test_checkpoint_that_was_tested_is_kept() -> None:
    options = QUICK["options"] | {"test_checkpoint": "last"}
    trained = mtl.fit(visits(), TASKS, **QUICK | {"options": options})
    assert (trained.folder / "checkpoints" / "last.ckpt").exists()


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    """The folder may come from a stranger."""
    trained = mtl.fit(visits(), TASKS, gate="comet", **QUICK | {"logger": "csv"})
    shares = trained.folder / "routing" / "expert_share.csv"
    shares.rename(tmp_path / "outside.csv")
    shares.symlink_to(tmp_path / "outside.csv")
    with pytest.raises(InputError, match=r"expert_share\.csv: must be a regular file"):
        trained.plot("experts")
