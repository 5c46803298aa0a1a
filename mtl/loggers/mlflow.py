"""Log to MLflow."""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import MLFlowLogger
from pytorch_lightning.utilities import rank_zero_only

import mtl
from mtl.checks import require_packages
from mtl.files.run_files import checked_file, flatten
from mtl.files.writing import write_text
from mtl.loggers.base import RunLogger

MAX_PARAM_CHARS = 250  # characters of an option that Lightning writes
MODEL = "model"  # folder of the network among the artifacts of the run


class MLflowLog(RunLogger, MLFlowLogger):
    """Log to the database ``<save_dir>/mlflow/mlflow.db``, or to the server at ``tracking_uri``.

    A run that is resumed in its folder continues the same MLflow run, whose id is in ``<save_dir>/mlflow/run_id``.

    MLflow cannot delete points of a curve. A run that is resumed after ``kill -9`` writes the points since its last
    checkpoint a second time, at the same steps. On a CPU the values are the same, except durations; on a GPU they may
    differ. ``logger=csv`` has every step once.

    ``register``: the name of the registered model of which the network of the finished run becomes the next version.
    """

    def __init__(
        self,
        save_dir: str,
        experiment_name: str = "mtl",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        register: str | None = None,
    ) -> None:
        require_packages("logger=mlflow", "mlflow", "mlflow")
        if register:
            require_packages("logger.mlflow.register", "hub", "safetensors")
        self._register = register
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
            run_id=checked_file(self._id_file, folder).read_text().strip() if self._id_file.is_file() else None,
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
        options = {_name(name): str(value)[:MAX_PARAM_CHARS] for name, value in flatten(dict(params)).items()}
        logged = self.experiment.get_run(self.run_id).data.params
        super().log_hyperparams({name: value for name, value in options.items() if name not in logged})

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a point of each curve; characters that MLflow refuses become ``_``, as in ``ndcg_10``."""
        super().log_metrics({_name(name): float(value) for name, value in metrics.items()}, step)

    @rank_zero_only
    def log_picture(self, name: str, file: Path, step: int) -> None:
        """Add the PNG ``file`` to the artifacts of the run."""
        self.experiment.log_artifact(self.run_id, str(file), name.rpartition("/")[0])

    @rank_zero_only
    def log_finished(self, write: Callable[[Path], None]) -> None:
        """Register the network of the finished run, if a name was given; ``write`` writes it into a new folder."""
        if not self._register:
            return
        import mlflow
        from mlflow.exceptions import MlflowException

        with tempfile.TemporaryDirectory() as scratch:
            card, model = Path(scratch) / "card", Path(scratch) / "model"
            write(card)
            needed = [f"mtl-experts=={mtl.__version__}"]
            mlflow.pyfunc.save_model(model, loader_module=__name__, data_path=card, pip_requirements=needed)
            self.experiment.log_artifacts(self.run_id, str(model), MODEL)
        with contextlib.suppress(MlflowException):  # it is there already; for another reason, the next line fails too
            self.experiment.create_registered_model(self._register)
        self.experiment.create_model_version(self._register, f"runs:/{self.run_id}/{MODEL}", self.run_id)


def _load_pyfunc(path: str) -> Any:
    """Return the registered network in the folder ``path``: ``predict`` takes and gives a DataFrame of pandas.

    ``mlflow.pyfunc.load_model`` calls it.
    """
    return mtl.load(path)


def _name(name: str) -> str:
    """Return ``name`` in the characters that MLflow takes."""
    return re.sub(r"[^a-zA-Z0-9_/. -]", "_", name)
