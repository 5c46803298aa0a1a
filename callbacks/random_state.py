"""Carry the random number streams of a run in its checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from mtl.hooks import need_hook
from mtl.parallel import gather


class RandomState(Callback):
    """Give every process streams of its own, save them, and put them back before the first step of a resumed run.

    torch, numpy, Python and CUDA. They are put back as late as possible: what a start draws from them does not count.
    """

    def __init__(self) -> None:
        self._saved: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank:  # the first keeps its streams: they are those of a run on one process
            seed = torch.initial_seed() + trainer.global_rank
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
        need_hook(trainer, self, "on_train_batch_start", True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if len(self._saved) == trainer.world_size:  # on other processes than before there is nothing to put back
            set_state(self._saved[trainer.global_rank])
        self._saved = []
        need_hook(trainer, self, "on_train_batch_start", False)

    def state_dict(self) -> dict[str, Any]:
        return {"streams": gather(get_state())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = list(state_dict["streams"])


def get_state() -> dict[str, Any]:
    """Return the state of all streams of this process, as tensors and plain Python."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }


def set_state(state: dict[str, Any]) -> None:
    """Put all streams of this process back to ``state``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
