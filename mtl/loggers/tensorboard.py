"""Log to TensorBoard, arranged for its pages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams

# TensorBoard sorts groups of charts by name and opens the first two: these have to come after train and val
AFTER_TEST = "values_of_test"
LOSSES = ("mse", "logloss")  # metrics that are a task's loss under another name, unless it is weighted or standardised


class TensorBoardLog(TensorBoardLogger):
    """Write curves, pictures and a row of options to ``save_dir``, by whose name TensorBoard calls the run.

    TensorBoard draws a chart for each name. Values that are not curves are left out: the epoch that Lightning adds to
    all values, the test results, and a task's ``mse`` or ``logloss`` where it equals the task's loss.
    """

    def __init__(self, save_dir: str) -> None:
        super().__init__(save_dir, name="", version="", default_hp_metric=False)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a point of each curve."""
        curves = {
            name: value
            for name, value in metrics.items()
            if name != "epoch" and not name.startswith("test") and not _is_loss(name, metrics)
        }
        super().log_metrics(curves, step)

    @rank_zero_only
    def log_picture(self, name: str, file: Path, step: int) -> None:
        """Show the PNG ``file`` as it is."""
        with Image.open(file) as image:
            width, height, channels = *image.size, len(image.getbands())
        shown = Summary.Image(encoded_image_string=file.read_bytes(), width=width, height=height, colorspace=channels)
        self.experiment.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=shown)]), step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Mapping[str, float] | None = None, step: int | None = None) -> None:
        """Write the run's row of the page HParams: options and final metrics, both in the given order.

        Without ``metrics`` nothing is written: the page shows no row without them.
        """
        if not metrics:
            return
        # The page sorts options by name and opens the first five, but shows their display names
        names = {f"{index:02d}_{name}": name for index, name in enumerate(params)}
        columns = [hparams.HParam(name, display_name=shown) for name, shown in names.items()]
        tags = {f"{AFTER_TEST}/{name.removeprefix('test/')}": value for name, value in metrics.items()}
        measured = [hparams.Metric(tag, display_name=name) for tag, name in zip(tags, metrics, strict=True)]
        row = {name: _plain(params[shown]) for name, shown in names.items()}
        writer = self.experiment.file_writer
        writer.add_summary(hparams.hparams_config_pb(columns, measured), 0)
        writer.add_summary(hparams.hparams_pb(row, trial_id=""), 0)  # "": its name is that of the run
        super().log_metrics(tags, step)

    @rank_zero_only
    def save(self) -> None:
        """Do nothing: values are written when they are logged, and ``config.yaml`` holds the options."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Flush the file; it stays open for the test after the training."""
        if self._experiment is not None:
            self.experiment.flush()

    @rank_zero_only
    def close(self) -> None:
        """Close the file at the end of the run."""
        if self._experiment is not None:
            self.experiment.close()


def _is_loss(name: str, metrics: Mapping[str, Any]) -> bool:
    """Return whether ``name`` is a metric that equals the loss of its task."""
    group, _, rest = name.partition("/")
    task, _, metric = rest.rpartition("/")
    loss = f"{group.removesuffix('_metrics')}/{task}/loss"
    if metric not in LOSSES or loss not in metrics:
        return False
    return math.isclose(float(metrics[name]), float(metrics[loss]), rel_tol=1e-4)


def _plain(value: Any) -> bool | float | str:
    """Return an option in a type that TensorBoard accepts: numbers unchanged, anything else as text."""
    return value if isinstance(value, bool | int | float | str) else str(value)
