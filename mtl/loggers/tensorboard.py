"""Log to TensorBoard, arranged for its pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary


class TensorBoardLog(TensorBoardLogger):
    """Write curves and pictures to ``save_dir``, whose name TensorBoard shows as the run.

    TensorBoard draws a chart for each name. Values that are not curves are left out: the epoch that Lightning adds to
    all values, and the test results.
    """

    def __init__(self, save_dir: str) -> None:
        super().__init__(save_dir, name="", version="", default_hp_metric=False)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a point of each curve."""
        curves = {name: value for name, value in metrics.items() if name != "epoch" and not name.startswith("test")}
        super().log_metrics(curves, step)

    @rank_zero_only
    def log_picture(self, name: str, file: Path, step: int) -> None:
        """Show the PNG ``file`` as it is."""
        with Image.open(file) as image:
            width, height, channels = *image.size, len(image.getbands())
        shown = Summary.Image(encoded_image_string=file.read_bytes(), width=width, height=height, colorspace=channels)
        self.experiment.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=shown)]), step)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``config.yaml`` in the run folder holds all options."""

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
