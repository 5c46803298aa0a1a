"""Save the random number generators of a run in its checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from mtl.distributed import gather


class RandomState(Callback):
    """Seed each process differently, save the state of its random number generators, and restore it on resuming.

    The generators are those of torch, numpy, Python and CUDA. They are restored as late as possible, right before the
    first step, so that numbers drawn while the run starts have no effect.
    """

    def __init__(self) -> None:
        self._saved: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank:  # rank 0 keeps its seed, and so draws the numbers of a run on one process
            seed = torch.initial_seed() + trainer.global_rank
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if len(self._saved) == trainer.world_size:  # else a new run, or another number of processes
            set_state(self._saved[trainer.global_rank])
        self._saved = []

    def state_dict(self) -> dict[str, Any]:
        return {"streams": gather(get_state())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = list(state_dict["streams"])


def get_state() -> dict[str, Any]:
    """Return the states of this process's generators as tensors and plain Python values."""
    numpy_state: Any = np.random.get_state()
    kind, keys, position, has_gauss, gauss = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }


def set_state(state: dict[str, Any]) -> None:
    """Set this process's generators to ``state``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
