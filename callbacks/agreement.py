"""Refuse to train when the processes of a run have different configurations or initial states."""

from __future__ import annotations

import hashlib
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from mtl.checks import InputError
from mtl.distributed import gather, world_size
from mtl.records import flatten


class ProcessAgreement(Callback):
    """Compare the configuration and initial state of all processes before the first step; InputError if they differ.

    The check runs before DDP broadcasts the weights of rank 0, which would hide a difference.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or world_size() == 1:
            return
        config = {key: repr(value) for key, value in flatten(pl_module.config).items()}
        folder = config["paths.run_dir"].strip("'")  # may differ: only rank 0 writes files
        places = ("ckpt", "evaluate", "paths.")  # where this process reads and writes
        config = {key: value.replace(folder, "<run>") for key, value in config.items() if not key.startswith(places)}
        digests = {name: digest(value) for name, value in pl_module.state_dict().items() if hasattr(value, "numpy")}
        everyone = gather((config, digests))
        for rank, (theirs, state) in enumerate(everyone[1:], start=1):
            first_config, first_state = everyone[0]
            keys = [k for k in theirs.keys() | first_config.keys() if theirs.get(k) != first_config.get(k)]
            keys.sort(key=lambda key: (key.count("."), key))  # top-level keys first: others may be derived from them
            if keys:
                shown = "; ".join(f"{key} is {theirs.get(key)}, not {first_config.get(key)}" for key in keys[:3])
                raise InputError(f"process {rank} has a different configuration from process 0: {shown}. {_ADVICE}")
            names = sorted(k for k in state.keys() | first_state.keys() if state.get(k) != first_state.get(k))
            if names:
                raise InputError(
                    f"process {rank} has different initial values from process 0 in {', '.join(names[:3])} "
                    f"({len(names)} tensors differ). {_ADVICE}"
                )


_ADVICE = "Start all processes with the same command line and library versions; a sweep (-m) takes one device per job."


def digest(value: Any) -> str:
    """Return a hash of a tensor's bytes."""
    return hashlib.sha256(value.detach().cpu().contiguous().view(-1).numpy().tobytes()).hexdigest()[:16]
