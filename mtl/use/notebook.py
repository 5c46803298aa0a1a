"""What a notebook shows of a trained network: its metrics, its page, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import polars as pl
import torch

from mtl.analysis.figures import draw_heat_map
from mtl.checks import InputError, require
from mtl.data_modules.tables.cells import digest_of
from mtl.files.escaping import escape_mathtext
from mtl.files.run_files import COMMAND, checked_file, read_json
from mtl.files.writing import write_text
from mtl.options import FilePath, valid
from mtl.report.curves import draw_by_epoch
from mtl.report.errors import draw_reliability
from mtl.report.page import PAGE
from mtl.report.runs import config, read_results
from mtl.runs.predictions_file import read_predictions
from mtl.types import TaskSpec
from mtl.use.frames import to_polars
from mtl.use.permutation_importance import evaluation_of
from mtl.use.run_page import write_run_page
from mtl.use.trained import UNNAMED_TABLE, PlotKind, TrainedModel

_SIZE = (4.2, 3.2)  # inches of a panel
_SHARES = "expert_share*.csv"  # in the folder "routing" of a run, one for each layer
_MAX_BARS = 20  # columns of a table, the most important ones


@dataclass(frozen=True)
class ShownPage:
    """The page of a run at ``path``, which a notebook shows; scripts of a stranger's page cannot reach the notebook."""

    path: Path
    html: str

    def __repr__(self) -> str:
        return f"page of the run: {self.path}"

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 800px; border: 0"
        return f'<iframe sandbox="allow-scripts" srcdoc="{escape(self.html)}" style="{style}"></iframe>'


def html_of(model: TrainedModel) -> str:
    """Return the description of a trained model, its metrics beside those of other models, and its experts, as HTML."""
    tables = [to_polars(model.metrics_table()), *(_read_shares(model.folder) if model.folder else ())]
    with pl.Config(tbl_rows=40, tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True, float_precision=4):
        return f"<pre>{escape(repr(model))}</pre>" + "".join(table._repr_html_() for table in tables)


def write_page(model: TrainedModel, path: str | Path | None, rows: Any) -> ShownPage:
    """See ``TrainedModel.report``."""
    folder = run_folder(model)
    split = "train" if config(folder)["data"].get("test_path") is None else "test"
    frames = {} if rows is None else {split: to_polars(rows)}
    digests = read_json(folder / COMMAND).get("rows", {})
    same = all(digest_of(frame) == digests.get(name) for name, frame in frames.items())
    require(same, "rows: the model was trained on others; give those of mtl.fit, or of its test= if there were any")
    if frames or not (folder / PAGE).exists():
        write_run_page(folder, frames=frames)
    page = checked_file(folder / PAGE, folder).read_text()
    if path is not None:
        write_text(valid(FilePath, path, "path"), page)
    return ShownPage(Path(path or folder / PAGE), page)


def plot(model: TrainedModel, kind: PlotKind, rows: Any, tasks: Sequence[TaskSpec]) -> list[Any]:
    """See ``TrainedModel.plot``."""
    names = [task.name for task in tasks]
    if kind == "losses":
        require(rows is None, 'plot("losses") draws those of the training: leave out the rows')
        folder, panels = run_folder(model), _panels(len(names))
        results, _ = read_results(folder)
        epochs, tested = (results and results.epochs) or 0.0, model.stored.get("epoch")
        for axes, name in zip(panels, names, strict=True):
            metrics = [f"train/{name}/loss", f"val/{name}/loss"]
            is_drawn = epochs > 0 and draw_by_epoch(axes, folder, name, metrics, epochs, tested)
            require(is_drawn, f"the run in {folder} has not logged its losses: train it with logger=tensorboard or csv")
        return panels
    if kind == "importance":
        require(rows is not None, 'plot("importance") shuffles the cells of rows with labels: give them as rows')
        table = to_polars(model.importance(rows, tasks=names))
        panels = _panels(len(names))
        for axes, name in zip(panels, names, strict=True):
            part = table.filter(task=name).head(_MAX_BARS).reverse()
            columns = [escape_mathtext(column) for column in part["column"]]
            axes.barh(columns, part["importance"], xerr=part["std"], color="#0072B2")
            axes.set(title=escape_mathtext(name), xlabel=f"loss in {part['metric'][0]} if the column is shuffled")
        return panels
    if kind == "reliability":
        binary = [task for task in tasks if task.kind == "binary"]
        require(bool(binary), 'plot("reliability") draws probabilities of binary tasks, and there is none')
        if rows is None:
            predictions = read_predictions(run_folder(model), model=model.model_name)[1]
        elif model.labelled is None:
            raise InputError("the data of this network are no table, so there are no rows to read")
        else:
            batch = model.labelled(to_polars(rows), UNNAMED_TABLE)
            predictions = evaluation_of(model, [batch], model.spec.tasks).gathered()
        panels = _panels(1)
        draw_reliability(panels[0], [(task, predictions[task.name]) for task in binary if task.name in predictions])
        return panels
    require(rows is None, 'plot("experts") draws the experts of the test rows: leave out the rows')
    tables = _read_shares(run_folder(model))
    require(bool(tables), "the network has no experts; train one with gate=comet, say")
    panels = _panels(len(tables))
    for axes, table in zip(panels, tables, strict=True):
        table = table.filter(pl.col("task").is_in([*names, *{*table["task"]} - {*model.spec.task_names}]))
        shares = torch.from_numpy(table.drop("task").to_numpy().copy())
        draw_heat_map(axes, shares, [escape_mathtext(task) for task in table["task"]])
    return panels


def run_folder(model: TrainedModel) -> Path:
    """Return the folder of the run that trained ``model``. Raises InputError if it is not there."""
    if model.folder is None or not model.folder.is_dir():
        raise InputError("the folder of this model's run is not there: use what mtl.fit or mtl.load(RUN) returns")
    return model.folder


def _panels(count: int) -> list[Any]:
    """Return ``count`` axes beside each other in a figure, which notebooks show."""
    from matplotlib import pyplot  # chooses a backend when it is imported

    size = (_SIZE[0] * count, _SIZE[1])
    return list(pyplot.subplots(1, count, figsize=size, squeeze=False, layout="constrained")[1][0])


def _read_shares(folder: Path) -> list[pl.DataFrame]:
    """Return the mean weight of each expert for each task on the test rows, a table for each layer."""
    return [pl.read_csv(checked_file(path, folder)) for path in sorted((folder / "routing").glob(_SHARES))]
