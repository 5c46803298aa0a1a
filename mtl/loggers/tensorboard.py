"""Log to TensorBoard, arranged for its pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.summary import hparams

from mtl.files.escaping import escape_control
from mtl.files.run_files import flatten
from mtl.loggers.base import MAX_LISTED_TASKS, RunLogger

MAX_TEST_VALUES = 40  # values of a test beside its loss
CHOICES = ("data", "network", "gate", "weighting")


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that TensorBoard compares: the main choices, the seed and those that were given."""
    choices, values = config.get("choices") or {}, flatten(config)
    pairs = [override.lstrip("+~").partition("=") for override in config.get("overrides") or ()]
    options = {name: choices.get(name) for name in CHOICES} | {"seed": values.get("seed")}
    options |= {name: values.get(name, text) for name, _, text in pairs if name not in options}
    return {name: value if isinstance(value, int | float) else str(value) for name, value in options.items()}


class TensorBoardLog(RunLogger, TensorBoardLogger):
    """Write curves and pictures to ``save_dir``, whose name TensorBoard shows as the run.

    TensorBoard draws a chart for each name. Values that are not curves are left out: the epoch that Lightning adds to
    all values, and the test results, of which the page HPARAMS has loss and metrics, beside the options of the run.
    """

    config: Mapping[str, Any] | None = None

    def __init__(self, save_dir: str) -> None:
        super().__init__(save_dir, name="", version="", default_hp_metric=False)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a point of each curve."""
        curves = {name: value for name, value in metrics.items() if name != "epoch" and not name.startswith("test")}
        super().log_metrics(curves, step)
        if self.config is not None and "test/loss" in metrics:
            tasks = {name: float(value) for name, value in metrics.items() if name.count("/") == 2}
            test_metrics = {"test/loss": float(metrics["test/loss"])} | (tasks if len(tasks) <= MAX_TEST_VALUES else {})
            for summary in hparams(compared(self.config), test_metrics):
                self.experiment.file_writer.add_summary(summary)
            super().log_metrics(test_metrics, step)

    @rank_zero_only
    def log_picture(self, name: str, file: Path, step: int) -> None:
        """Show the PNG ``file`` as it is."""
        with Image.open(file) as image:
            width, height, channels = *image.size, len(image.getbands())
        encoded = Summary.Image(encoded_image_string=file.read_bytes(), width=width, height=height, colorspace=channels)
        self.experiment.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=encoded)]), step)

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:  # type: ignore[override]  # Lightning's takes a Namespace too
        """Show the command and the tasks; with the test, the options go to the page HPARAMS."""
        self.config = params
        tasks = flatten({"tasks": (params.get("data") or {}).get("tasks") or {}})
        lines = [str(params.get("command", "")), *(f"{name}: {value}" for name, value in tasks.items())]
        left = len(lines) - 1 - MAX_LISTED_TASKS
        lines = [*lines[: 1 + MAX_LISTED_TASKS], f"... and {left} more, in config.yaml"] if left > 0 else lines
        self.experiment.add_text("run", "\n".join(f"    {escape_control(line)}" for line in lines))

    @rank_zero_only
    def log_markdown(self, name: str, text: str) -> None:
        """Show ``text``, in Markdown, on the page TEXT."""
        self.experiment.add_text(name, text)

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
