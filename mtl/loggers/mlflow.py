"""Log to MLflow."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import MLFlowLogger
from pytorch_lightning.utilities import rank_zero_only

from mtl.checks import require_packages
from mtl.files.records import flatten, own_file
from mtl.files.writing import write_text

LONGEST = 250  # characters of an option that Lightning writes


class MLflowLog(MLFlowLogger):
    """Log to the database ``<save_dir>/mlflow/mlflow.db``, or to the server at ``tracking_uri``.

    A run that is resumed in its folder continues the same MLflow run, whose id is in ``<save_dir>/mlflow/run_id``.

    MLflow cannot delete points of a curve. A run that is resumed after ``kill -9`` writes the points since its last
    checkpoint a second time, at the same steps. On a CPU the values are the same, except durations; on a GPU they may
    differ. ``logger=csv`` has every step once.
    """

    def __init__(
        self, save_dir: str, experiment_name: str = "mtl", run_name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        require_packages("logger=mlflow", "mlflow", "mlflow")
        # They log the creation of tables
        for noisy in ("alembic", "mlflow.store.db", "pytorch_lightning.loggers.mlflow"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        folder = (Path(save_dir) / "mlflow").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self._id_file = folder / "run_id"
        self._own_pictures = None if tracking_uri else folder / "artifacts"
        super().__init__(
            experiment_name,
            run_name,
            tracking_uri or f"sqlite:///{folder}/mlflow.db",
            artifact_location=self._own_pictures.as_uri() if self._own_pictures else None,
            run_id=own_file(self._id_file, folder).read_text().strip() if self._id_file.is_file() else None,
        )

    @property
    def experiment(self) -> Any:
        """The client of MLflow; the first use starts the run."""
        client = super().experiment
        if self._run_id and not self._id_file.exists():
            write_text(self._id_file, self._run_id)
        return client

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:  # type: ignore[override]  # Lightning's takes a Namespace too
        """Write the options of the run; those that a resumed run changes stay, since MLflow refuses to change them."""
        options = {_name(name): str(value)[:LONGEST] for name, value in flatten(dict(params)).items()}
        known = self.experiment.get_run(self.run_id).data.params
        super().log_hyperparams({name: value for name, value in options.items() if name not in known})

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a point of each curve; characters that MLflow refuses become ``_``, as in ``ndcg_10``."""
        super().log_metrics({_name(name): float(value) for name, value in metrics.items()}, step)

    @rank_zero_only
    def log_picture(self, name: str, file: Path, step: int) -> None:
        """Add the PNG ``file`` to the artifacts of the run."""
        self.experiment.log_artifact(self.run_id, str(file), name.rpartition("/")[0])


def _name(name: str) -> str:
    """Return ``name`` in the characters that MLflow takes."""
    return re.sub(r"[^a-zA-Z0-9_/. -]", "_", name)
