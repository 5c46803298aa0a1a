"""Use a trained network: ``mtl.load(CHECKPOINT).predict(rows)``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import polars as pl
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from mtl import predictions
from mtl.chains import with_earlier
from mtl.checkpoints.files import Checkpoint, CheckpointIO, read, restoring, using
from mtl.checks import InputError, first_line, format_value, join_names, require
from mtl.config import build
from mtl.config.resume import config_to_load
from mtl.files.formatting import number
from mtl.networks.ensemble import Ensemble
from mtl.networks.packing import Packing
from mtl.nn.functional import has_float64
from mtl.options import Count, FilePath, LargeCount, OpenFraction, Positive, RunSeed, valid, validated
from mtl.report.runs import read_results
from mtl.runs.predictions_file import read_predictions
from mtl.table_models.blend import Blend, in_words
from mtl.table_models.fitted import FittedModels
from mtl.training.evaluation import predict_batches
from mtl.training.fit_calibration import measure_intervals
from mtl.training.measurements import BLEND, NETWORK, Measurements, is_routing
from mtl.training.thresholds import Rule, decisions
from mtl.types import ROW, Batch, DataSpec, NetworkOutput, RowEncoder, TaskSpec
from mtl.use.drift import THRESHOLD, drift
from mtl.use.effects import cell_effects
from mtl.use.frames import like, to_pandas, to_polars
from mtl.use.permutation_importance import evaluation_of, importance

PlotKind = Literal["losses", "reliability", "experts", "importance"]
UNNAMED_TABLE = "the table"  # name in messages for rows that do not come from a file


@dataclass(frozen=True, repr=False)
class TrainedModel:
    """A trained network in evaluation mode, with its tasks and the encoder that turns rows into inputs.

    Of a table, ``network`` may be the blend of a network and other models, see ``mtl.table_models.blend.Blend``.

    ``encoder`` is None if the data have no raw rows, as for images: ``predict`` then takes tensors. ``model_name`` says
    which model of the run it is, as the argument ``model`` of ``load``. ``metrics_by_model`` has the metrics of all
    models that were tested beside each other, see ``metrics``. ``stored``: the content of the checkpoint but for the
    weights of the network and the state of the training. ``labelled`` reads rows with their labels; None if the data
    are no table. ``folder``: that of the run, if it has tested this network. ``pandas``: whether the training
    rows were of pandas.
    """

    network: nn.Module
    spec: DataSpec
    encoder: RowEncoder | None
    device: torch.device
    stored: Mapping[str, Any] = field(default_factory=dict)
    labelled: Callable[[pl.DataFrame, str], Batch] | None = None
    metrics_by_model: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    model_name: str = NETWORK
    folder: Path | None = None
    pandas: bool = False

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.core.parameters())
        lines = [
            f"TrainedModel: {type(self.core).__name__} with {parameters:,} parameters on {self.device}",
            *([in_words(self.network.weights)] if isinstance(self.network, Blend) else []),
            f"tasks: {join_names(f'{task.name} ({task.kind})' for task in self.spec.tasks)}",
            f"inputs: {join_names(self.columns) or _inputs(self.spec)}",
        ]
        return "\n".join(lines)

    @property
    def columns(self) -> list[str]:
        """The columns that rows must have; empty without an encoder."""
        return [] if self.encoder is None else list(self.encoder.columns)

    @property
    def core(self) -> nn.Module:
        """The network that was trained, without the models that it is blended with."""
        return self.network.network if isinstance(self.network, Blend) else self.network

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Losses and metrics on the test rows, by names such as "click/auroc"; None is undefined."""
        return self.metrics_by_model.get(self.model_name, {})

    def metrics_table(self) -> Any:
        """Return the test metrics of all models that were tested beside each other; null is undefined.

        The columns are task, metric, network, constant, those of a table's models and blend, as far as they were
        computed. The result is of polars, or of pandas if the rows of the training were.
        """
        table = Measurements.from_plain({"test": self.metrics_by_model}).by_model()
        table = table.filter(pl.col("task").is_in([task.name for task in self.spec.tasks]))
        return to_pandas(table) if self.pandas else table

    def report(self, path: str | Path | None = None, rows: Any = None) -> Any:
        """Return the page of the model's run, ``report.html`` in its folder, for a notebook; copy it to ``path``.

        It is written if it is not there. ``rows``: those of the training, or of ``test=`` if they had their own, for a
        run whose rows were in memory: the page is then written with the largest errors and the importance of columns.
        Raises InputError without the run's folder.
        """
        from mtl.use.notebook import write_page  # imports matplotlib

        return write_page(self, path, rows)

    @validated
    def plot(self, kind: PlotKind, rows: Any = None, tasks: Sequence[str] | None = None) -> list[Any]:
        """Draw with matplotlib's pyplot, and return the axes of the panels.

        ``losses``: those of training and validation by epoch, for each task. ``reliability``: the share of positive
        rows over the predicted probability, of binary tasks, on the test rows or on ``rows`` with labels. ``experts``:
        the mean weight of each expert for each task, for each layer, on the test rows. ``importance``: see the method,
        of ``rows`` with labels. ``tasks``: by default all. Raises InputError for what the model does not have.
        """
        from mtl.use.notebook import plot  # imports matplotlib

        return plot(self, kind, rows, self.tasks_named(tasks))

    def _repr_html_(self) -> str:
        from mtl.use.notebook import html_of  # imports matplotlib

        return html_of(self)

    def encode(self, frame: pl.DataFrame, where: str = UNNAMED_TABLE, task: str | None = None) -> dict[str, Tensor]:
        """Return the inputs of raw rows; see ``mtl.types.RowEncoder.encode``. Raises InputError without an encoder."""
        if self.encoder is None:
            raise InputError(f"the data of this network have no raw rows: give tensors of {_inputs(self.spec)}")
        return self.encoder.encode(frame, where, task)

    @validated
    def predict(
        self,
        rows: Any,
        tasks: Sequence[str] | None = None,
        experts: bool = False,
        batch_size: LargeCount = 4096,
        where: str = UNNAMED_TABLE,
        interval: float | None = None,
    ) -> Any:
        """Return a polars DataFrame with the predictions for each row, in the order of the rows.

        ``rows``: a DataFrame of polars or pandas, a dict of columns, or a dict of the network's input tensors. For a
        pandas DataFrame the result is one too, with the same index. ``tasks``: the tasks to predict, by default all.
        For the columns of the result see ``mtl.predictions.columns``; a task after another also has
        TASK_probability_given_BEFORE, while TASK_probability is that of the whole chain. An ensemble also gives
        TASK_spread, see ``mtl.predictions.spread``. ``experts`` adds TASK_experts,
        the experts that the row used with their weights, as in "3:0.71 0:0.29" (TASK_experts_LAYER if there are several
        layers). ``interval``, such as 0.9: each regression has TASK_low and TASK_high too, and at least this share of
        the labels of new rows like those of the validation is between them, see
        ``mtl.training.fit_calibration.conformal_scores``.
        ``where`` names the rows in messages. Raises InputError if a column is missing or a cell cannot be read, or if
        the validation rows were too few for the interval.
        """
        specs, tasks_by_name = self.tasks_named(tasks), {task.name: task for task in self.spec.tasks}
        margins = {} if interval is None else self.margins(interval, specs)
        table_or_tensors = rows if _is_tensors(rows) else to_polars(rows)
        values: dict[str, list[Tensor]] = {}
        spreads: dict[str, list[Tensor]] = {}
        used: dict[tuple[str, str], list[pl.Series]] = {}
        for batch, output in self._outputs(table_or_tensors, with_earlier(specs, tasks_by_name), batch_size, where):
            outputs = {name: value.cpu() for name, value in output.predictions.items()}
            for name, value in predictions.readable(tasks_by_name, outputs).items():
                values.setdefault(name, []).append(value)
            of_members = {name: value.cpu() for name, value in output.members.items()}
            for name, value in predictions.spread(tasks_by_name, of_members).items():
                spreads.setdefault(name, []).append(value)
            if experts:
                for key, weights in self._weights(batch.inputs, output):
                    used.setdefault(key, []).append(experts_used(weights))
        message = "experts: this network has none; train one with gate=comet, say"
        require(not experts or bool(used) or not values, message)
        table: dict[str, pl.Series] = {}
        for task in specs:
            value = torch.cat(values.get(task.name, [predictions.empty(task)]))
            table |= predictions.columns(task, value)
            if task.name in margins:
                low, high = predictions.interval(task, value, margins[task.name])
                table |= {f"{task.name}_low": pl.Series(low.numpy()), f"{task.name}_high": pl.Series(high.numpy())}
            if task.after is not None:
                parts = values.get(predictions.conditional(task), [predictions.empty(task)])
                table[f"{task.name}_probability_given_{task.after}"] = pl.Series(torch.cat(parts).numpy())
            if isinstance(self.core, Ensemble):
                parts = spreads.get(task.name, [predictions.empty(task)])
                table[f"{task.name}_spread"] = pl.Series(torch.cat(parts).flatten().numpy())
            keys = [key for key in used if key[0] == task.name]
            for key in keys:
                table["_experts_".join(key) if len(keys) > 1 else f"{key[0]}_experts"] = pl.concat(used[key])
        return like(rows, pl.DataFrame(table), indexed=True)

    @validated
    def routing(
        self, rows: Any, tasks: Sequence[str] | None = None, batch_size: LargeCount = 4096, where: str = UNNAMED_TABLE
    ) -> Any:
        """Return the experts that each row uses for each task: columns row (from 0), layer, task, expert and weight.

        Only weights other than 0 are listed. In a network on texts that routes tokens, the weight of a row is the mean
        over its tokens. A network without experts gives no rows. The result is of polars, or of pandas if ``rows`` are.
        """
        parts, start = [pl.DataFrame(schema=ROUTING)], dict[tuple[str, str], int]()
        table_or_tensors = rows if _is_tensors(rows) else to_polars(rows)
        for batch, output in self._outputs(table_or_tensors, self.tasks_named(tasks), batch_size, where):
            for key, weights in self._weights(batch.inputs, output):
                row, expert = weights.nonzero(as_tuple=True)
                done = start.get(key, 0)
                start[key] = done + len(weights)
                columns = {"row": (row + done).numpy(), "layer": key[1], "task": key[0], "expert": expert.numpy()}
                columns["weight"] = weights[row, expert].numpy()
                parts.append(pl.DataFrame(columns, schema=ROUTING))
        return like(rows, pl.concat(parts).sort("row", maintain_order=True))

    @validated
    def evaluate(
        self,
        rows: Any,
        batch_size: LargeCount = 4096,
        where: str = UNNAMED_TABLE,
        threshold: Rule | None = None,
        interval: float | None = None,
    ) -> dict[str, float]:
        """Return loss and metrics of rows with labels, by the names of ``metrics``; NaN is undefined.

        ``rows``: as in ``predict``, with a column for each task. ``threshold``: "f1" or costs, such as
        ``{"fp": 1, "fn": 10}``. The validation rows of the run, whose folder must have its predictions, then choose
        the threshold of each binary task with the highest F1 or the least cost: TASK/threshold, and the measurements
        of these decisions, TASK/precision_at_threshold and so on, see
        ``mtl.training.thresholds.measure_decisions``. ``interval``: a level, such as 0.9, for TASK/interval_coverage,
        the share of the labels within the intervals of this level, and TASK/interval_width, their mean in
        units. Raises InputError.
        """
        if self.labelled is None:
            raise InputError("the data of this network are no table: test it with mtl evaluate RUN")
        evaluation = evaluation_of(self, [self.labelled(to_polars(rows), where)], self.spec.tasks, batch_size)
        measured = evaluation.compute()
        specs = {task.name: task for task in self.spec.tasks}
        if threshold is not None:
            if self.folder is None:
                raise InputError("threshold: this network was not read from the folder of a run")
            validation = read_predictions(self.folder, "val", self.model_name)[1]
            for task, values in decisions(specs, validation, evaluation.gathered(), threshold).items():
                for name, value in values.items():
                    key = f"{task}/{name}" if name == "threshold" else f"{task}/{name}_at_threshold"
                    measured[key] = math.nan if value is None else value
        if interval is not None:
            self.margins(interval, self.spec.tasks)
            for task, ends in measure_intervals(specs, evaluation.gathered(), interval).items():
                measured |= {f"{task}/interval_{name}": ends[name] for name in ("coverage", "width")}
        return measured

    @validated
    def importance(
        self,
        rows: Any,
        repeats: Count = 5,
        seed: RunSeed = 0,
        where: str = UNNAMED_TABLE,
        tasks: Sequence[str] | None = None,
    ) -> Any:
        """Return how much worse each task's main metric becomes if the cells of a column are shuffled among the rows.

        The columns are task, column, metric, importance (the mean over ``repeats`` shuffles of the loss in metric; at
        most about 0 for a column that the network does not need) and std. ``rows``: as in ``evaluate``. An importance
        that is undefined is NaN. ``tasks``: by default all. The result is of polars, or of pandas if ``rows`` are.
        """
        if self.labelled is None:
            raise InputError("the data of this network are no table, so it has no columns to shuffle")
        batch = self.labelled(to_polars(rows), where)
        return like(rows, importance(self, batch, self.tasks_named(tasks), repeats, seed))

    @validated
    def explain(
        self,
        rows: Any,
        tasks: Sequence[str] | None = None,
        reference: Any = None,
        samples: Count = 20,
        seed: RunSeed = 0,
        where: str = UNNAMED_TABLE,
    ) -> Any:
        """Return how much each cell of a row raises its predictions: columns row (from 0), task, column and effect.

        An effect is the prediction minus its mean if the cell came from other rows instead, ``samples`` random ones of
        ``reference`` (default: of ``rows``), all other cells being the same: in the unit of a regression, as the
        probability of yes, or as that of the class that is predicted. Effects of columns that act together do not add
        up to the prediction. The largest of a row and task stand first. ``rows``: as in ``predict``; the result is of
        polars, or of pandas if ``rows`` are.
        """
        require(bool(self.columns) and not _is_tensors(rows), "explain needs rows of a table, whose cells are changed")
        frame = to_polars(rows)
        others = frame if reference is None else to_polars(reference)
        return like(rows, cell_effects(self, frame, self.tasks_named(tasks), others, samples, seed, where))

    @validated
    def drift(
        self, rows: Any, threshold: Positive = THRESHOLD, batch_size: LargeCount = 4096, where: str = UNNAMED_TABLE
    ) -> Any:
        """Return how far the columns of rows, and their predictions, have changed since the training; worst first.

        A column has ``drifted`` if its ``psi``, the population stability index, is above ``threshold``, and ``p``, the
        probability of such a change by chance, corrected by Holm's method for the number of rows of the table, is below
        0.05. There are also the shares of unknown categories and of missing cells, and the means of numbers, in the
        training rows (``unknown_reference``, ...) and in these. Rows whose ``kind`` is prediction compare the
        predictions of a task with those of the validation. What is not known, such as the predictions of a task without
        labels there, is null. ``rows``: as in ``predict``; the result is of polars, or of pandas if ``rows`` are.
        Raises InputError for a checkpoint of an older version, which has no histograms.
        """
        return like(rows, drift(self, to_polars(rows), threshold, batch_size, where))

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that ``mtl.load`` and ``mtl evaluate`` read. Raises InputError if it cannot be written."""
        CheckpointIO().save_checkpoint(self.content(), valid(FilePath, path, "path"))

    def content(self) -> dict[str, Any]:
        """Return the content of a checkpoint: weights, and plain data on configuration, data and metrics."""
        weights = {f"network.{name}": value for name, value in self.core.state_dict().items()}
        metrics = {model: {**values} for model, values in self.metrics_by_model.items()}
        return {**self.stored, "state_dict": {**self.stored["state_dict"], **weights}, "metrics": metrics}

    def margins(self, level: float, tasks: Sequence[TaskSpec]) -> dict[str, float]:
        """Return ``TaskSpec.interval_margin`` of the regressions among ``tasks``. Raises InputError."""
        blended = f"interval={level:g}: intervals are those of the blend; use it, without model={self.model_name}"
        require("model" not in self.stored, blended)
        level, numbers = valid(OpenFraction, level, "interval"), [task for task in tasks if task.kind == "regression"]
        require(bool(numbers), f"interval={level:g}: none of the tasks is a regression, so there are no intervals")
        return {task.name: task.interval_margin(level) for task in numbers}

    def tasks_named(self, names: Sequence[str] | None) -> list[TaskSpec]:
        """Return the named tasks, in the order of the network; None means all. Raises InputError."""
        all_names = self.spec.task_names
        unknown = [name for name in names or () if name not in all_names]
        require(not unknown, f"no task {', '.join(map(repr, unknown))}; the tasks are {', '.join(all_names)}")
        return [task for task in self.spec.tasks if names is None or task.name in names]

    def _outputs(
        self, rows: pl.DataFrame | dict[str, Tensor], tasks: Sequence[TaskSpec], batch_size: int, where: str
    ) -> Iterator[tuple[Batch, NetworkOutput]]:
        """Yield each batch, and the outputs of the network for it, for each group of tasks with the same inputs."""
        names = [task.name for task in tasks]
        if isinstance(rows, dict):
            missing = [name for name in self.spec.inputs if name not in rows]
            require(not missing, f"the inputs lack {', '.join(missing)}; this network reads {_inputs(self.spec)}")
            sizes = {name: len(value) for name, value in rows.items()}
            require(len(set(sizes.values())) == 1, f"the inputs have different numbers of rows: {sizes}")
            starts = range(0, next(iter(sizes.values())), batch_size)
            inputs = ({name: value[start : start + batch_size] for name, value in rows.items()} for start in starts)
            yield from predict_batches(self.network, (Batch(part, {}) for part in inputs), self.device, names)
            return
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            groups.setdefault(() if self.encoder is None else tuple(self.encoder.columns_of(name)), []).append(name)
        for members in groups.values():
            self.encode(rows.clear(), where, members[0])  # a missing column is reported before any work is done
        numbered = rows if ROW in rows.columns else rows.with_row_index(ROW, offset=1)
        for start in range(0, len(rows), batch_size):
            frame = numbered[start : start + batch_size]
            for members in groups.values():
                batch = Batch(self.encode(frame, where, members[0]), {})
                yield from predict_batches(self.network, [batch], self.device, members)

    def _weights(self, inputs: Mapping[str, Tensor], output: NetworkOutput) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Yield (task, layer) and the weights ``[B, E]`` of each task of a batch in each layer that routes."""
        network: Any = self.network
        size, predicted = len(next(iter(inputs.values()))), list(output.predictions)
        all_names = self.spec.task_names
        for layer, routing in output.routings.items():
            weights = routing.weights.float().cpu()
            weights = weights.expand(size, -1, -1) if weights.dim() == 2 else weights  # [B, T, E]
            if len(weights) != size:  # [tokens, T, E]
                row = Packing(inputs["tokens"] != network.pad).row.cpu()
                sums = weights.new_zeros(size, *weights.shape[1:]).index_add(0, row, weights)
                weights = sums / row.bincount(minlength=size)[:, None, None]
            rows = range(weights.shape[1]) if routing.tasks is None else list(routing.tasks)
            for task in predicted:
                yield (task, layer), weights[:, rows.index(all_names.index(task)) if weights.shape[1] > 1 else 0]


TRAINING = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks")  # the state of a training
OF_ALL = ("loss", "average", "small_average")  # metrics of all tasks together
ROUTING = {"row": pl.Int64, "layer": pl.String, "task": pl.String, "expert": pl.Int64, "weight": pl.Float32}


def load(
    path: str | Path,
    trust: Sequence[str] = (),
    device: str | torch.device | None = None,
    network: nn.Module | None = None,
    data: Any = None,
    model: str | None = None,
) -> TrainedModel:
    """Return the trained model of a run, given its folder or one of its checkpoints. No file of the data is needed.

    ``model``: by default the blend of a table's models if the run has one, else the network; or one of them alone:
    "network", "linear", "lightgbm" or "catboost". Calibration and intervals are those of the default alone.

    ``trust``: packages of your own whose classes the checkpoint may name. ``device``: where the network computes, by
    default a GPU if there is one. Raises InputError if the checkpoint is damaged or names classes that are not trusted.

    A checkpoint that a Trainer of your own wrote does not say how to build its network: give ``network``, which gets
    the weights, and ``data``, a data module of the same class and options; it is not set up.
    """
    if network is None and data is None:
        checkpoint = read(path)
        return model_of(checkpoint, config_to_load(checkpoint, trust), device, model)
    if network is None or data is None:
        raise InputError("give network and data together, or neither")
    checkpoint = _only(read(path), model)
    data.load_state_dict(checkpoint.data())
    return _model(checkpoint, network, data, device)


def model_of(
    checkpoint: Checkpoint, cfg: DictConfig, device: str | torch.device | None = None, model: str | None = None
) -> TrainedModel:
    """Return the trained model of ``checkpoint``, whose configuration is ``cfg``; see ``load``."""
    checkpoint = _only(checkpoint, model)
    with using(checkpoint):
        data: Any = build.build_data(cfg)
        data.load_state_dict(checkpoint.data())
        network = build.build_network(cfg, checkpoint.calibrated(data.spec), load_pretrained=False)
    return _model(checkpoint, network, data, device)


def _only(checkpoint: Checkpoint, model: str | None) -> Checkpoint:
    """Return ``checkpoint`` with one ``model`` of its blend alone, see ``load``. Raises InputError without it."""
    blend = checkpoint.get("blend") or {}
    default = BLEND if blend else NETWORK
    names = [default, NETWORK, *blend.get("models", ())]
    message = f"model={model}: checkpoint {checkpoint.path} has {join_names(dict.fromkeys(names))}"
    require(model in (None, *names), message)
    if model in (None, default):
        return checkpoint
    weights = {task: {NETWORK: 0.0, model: 1.0} for task in blend.get("weights", ())}
    alone = blend | {"weights": weights} if model != NETWORK else {}
    changed = {"blend": alone, "calibration": {}, "predicted": {}, "model": model}
    return Checkpoint({**checkpoint, **changed}, checkpoint.path)


def _model(checkpoint: Checkpoint, network: Any, data: Any, device: str | torch.device | None) -> TrainedModel:
    """Return the trained model with the weights of ``checkpoint`` in ``network``; ``data`` has its state."""
    spec = checkpoint.calibrated(data.spec)
    with restoring(checkpoint):
        network.load_state_dict(checkpoint.weights())
    if blend := checkpoint.get("blend"):
        with using(checkpoint):
            others = FittedModels.restore(blend, spec)
            network = Blend(network, others.models, others.weights)
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        place = place if has_float64(place) or not blend else torch.device("cpu")
        network = network.eval().to(place)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise InputError(f"device={format_value(device)}: {first_line(error)}") from error
    stored = {name: value for name, value in checkpoint.items() if name not in TRAINING}
    state = {name: v for name, v in checkpoint["state_dict"].items() if not name.startswith("network.")}
    folder, name = checkpoint.path.parent.parent, checkpoint.get("model", BLEND if blend else NETWORK)
    results, stored = read_results(folder)[0], {**stored, "state_dict": state}
    # "last weights": there is no best.ckpt
    is_tested = results is not None and results.checkpoint.rpartition("/")[2] in (checkpoint.path.name, "last weights")
    tested = results.measured if results is not None and is_tested else Measurements()
    metrics = checkpoint.get("metrics") or _metrics_by_model(tested, spec.task_names)
    rows = data.row_encoder, place, stored, data.labelled
    return TrainedModel(network, spec, *rows, metrics, name, folder if tested else None)


def _metrics_by_model(tested: Measurements, tasks: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Return the losses and metrics of ``tasks`` on the test rows, of each model; None is undefined."""
    metrics: dict[str, dict[str, float | None]] = {model: {} for model in tested.models()}
    for key in tested:
        is_metric = key.task in tasks and not is_routing(key.metric)
        if key.split == "test" and key.model in metrics and (is_metric or (not key.task and key.metric in OF_ALL)):
            name = str(key._replace(split="", model=NETWORK))
            metrics[key.model][name] = tested.value(key.task, key.metric, model=key.model)
    return metrics


def experts_used(weights: Tensor) -> pl.Series:
    """Return, for each row of ``weights [B, E]``, the experts with weights other than 0, the largest weight first."""
    ordered, experts = weights.sort(stable=True, dim=-1, descending=True)
    pairs = zip(experts.tolist(), ordered.tolist(), strict=True)
    lines = [" ".join(f"{e}:{number(w, 3)}" for e, w in zip(*row, strict=True) if w) for row in pairs]
    return pl.Series(lines, dtype=pl.String)


def _is_tensors(rows: Any) -> bool:
    return isinstance(rows, Mapping) and bool(rows) and all(isinstance(value, Tensor) for value in rows.values())


def _inputs(spec: DataSpec) -> str:
    return join_names(f"{name} ({type(kind).__name__})" for name, kind in spec.inputs.items())
