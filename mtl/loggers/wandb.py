"""Log to Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from mtl.checks import require_packages
from mtl.loggers.base import RunLogger


class WandbLog(RunLogger, WandbLogger):
    """Log to the folder ``<save_dir>/wandb/``, and with ``mode="online"`` to the server.

    A run that is resumed in its folder continues the same Weights & Biases run, whose id is part of the folder names
    there. Offline, each start of the program adds a folder; ``wandb sync --append`` joins them.

    Weights & Biases writes values with a delay. After ``kill -9`` the last points are missing, and a resumed run logs
    again only the points since its last checkpoint. Points after this checkpoint that were already written appear
    twice, at the same ``trainer/global_step``; on a CPU they have the same values. Ctrl-C and SIGTERM save and lose
    nothing; ``logger=csv`` always has every step once.
    """

    def __init__(
        self,
        save_dir: str,
        project: str = "mtl",
        name: str | None = None,
        mode: Literal["offline", "online", "disabled"] = "offline",
        entity: str | None = None,
        group: str | None = None,
    ) -> None:
        require_packages("logger=wandb", "wandb", "wandb")
        Path(save_dir).mkdir(parents=True, exist_ok=True)  # else wandb would take another folder
        options: dict[str, Any] = {"mode": mode, "entity": entity, "group": group}
        super().__init__(name=name, save_dir=save_dir, project=project, id=earlier_id(Path(save_dir)), **options)
        self._failed = False

    @rank_zero_only
    def log_picture(self, name: str, file: Path, step: int) -> None:
        """Show the PNG ``file``."""
        self.log_image(name, [str(file)], step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Note whether training or test failed; the run stays open for the test after the training."""
        super().finalize(status)
        self._failed |= status != "success"

    @rank_zero_only
    def close(self) -> None:
        """End the run: the next job of a sweep has to start one of its own."""
        if self._experiment is not None:
            run: Any = self._experiment
            run.finish(exit_code=int(self._failed))


def earlier_id(save_dir: Path) -> str | None:
    """Return the id of the latest run below ``save_dir``, None if there is none.

    Folders are named ``run-<time>-<id>`` and ``offline-run-<time>-<id>``.
    """
    names = [path.name.removeprefix("offline-") for path in (save_dir / "wandb").glob("*run-*-*") if path.is_dir()]
    return max(names).split("-", 2)[2] if names else None
