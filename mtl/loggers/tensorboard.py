"""Log to TensorBoard, arranged for its pages."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from mtl.files.escaping import escape_control
from mtl.files.formatting import number
from mtl.files.run_files import flatten
from mtl.files.tables import Table
from mtl.loggers.base import MAX_LISTED_TASKS, RunLogger
from mtl.loggers.pictures import GROUP
from mtl.overrides import LOCAL

TEST_LOSS = f"{GROUP}/test_loss"  # a chart of one point that HPARAMS needs: in the last group, behind train and val


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that TensorBoard compares: the gate, the seed, and those of the command line."""
    choices, values = config.get("choices") or {}, flatten(config)
    pairs = [override.lstrip("+~").partition("=") for override in config.get("overrides") or ()]
    options = {"gate": choices.get("gate"), "seed": values.get("seed")}
    typed = [(name, text) for name, _, text in pairs if name not in options and name.split(".")[0] not in LOCAL]
    options |= {name: values.get(name, text) for name, text in typed}
    return {name: value if isinstance(value, int | float) else str(value) for name, value in options.items()}


class TensorBoardLog(RunLogger, TensorBoardLogger):
    """Write curves and pictures to ``save_dir``, whose name TensorBoard shows as the run.

    TensorBoard draws a chart for each name, so values that are not curves have none: the epoch that Lightning adds to
    all values, and the test results, which are a table on the page TEXT. The page HPARAMS has the loss of the test
    beside the options of a run that has trained, both in the folder ``test``; it has no test of another run's network.
    """

    config: Mapping[str, Any] | None = None

    def __init__(self, save_dir: str) -> None:
        super().__init__(save_dir, name="", version="", default_hp_metric=False)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a point of each curve."""
        curves = {name: value for name, value in metrics.items() if name != "epoch" and not name.startswith("test")}
        super().log_metrics(curves, step)
        if self.config is None or "test/loss" not in metrics:
            return
        test = {name.removeprefix("test/"): float(value) for name, value in metrics.items() if name.startswith("test/")}
        rows = [[name, number(None if isnan(value) else value)] for name, value in test.items()]
        self.log_markdown("test", Table(["test", "value"], rows).markdown())
        if not self.config.get("evaluate"):
            # Without the first summary, which TensorBoard would take for those of all runs, what differs comes first
            _, *session = hparams(compared(self.config), {})
            with SummaryWriter(str(Path(self.save_dir) / "test")) as writer:  # else the curves would be metrics too
                for summary in session:
                    writer.file_writer.add_summary(summary)
                writer.add_scalar(TEST_LOSS, test["loss"], step)

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
