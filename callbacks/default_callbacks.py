"""The callbacks of every run that have no options and therefore no section in the configuration."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from mtl.gates.adaptive import AdaptiveGate, update_adaptive_gates
from mtl.networks.mixture import MixtureOfExperts
from mtl.runs.trial import TrialEnd

from .baselines import Baselines
from .epoch_report import EpochReport, TrialReport
from .monitoring import MonitorCheck
from .phase_length import did_step
from .random_state import RandomState
from .sanity_guards import FiniteGuard, ProcessAgreement


def standard_callbacks(trial: TrialEnd | None = None) -> list[Callback]:
    """Return the callbacks that every run has, in order; they come before the callbacks of the configuration.

    ``trial``: see ``TrialReport``.
    """
    return [
        MonitorCheck(),
        ProcessAgreement(),
        RandomState(),
        FiniteGuard(),
        LayerAdaptation(),
        EpochReport(),
        Baselines(),
        TrialReport(trial),
    ]


class LayerAdaptation(Callback):
    """Let gates and mixture layers adapt to the batches of an optimiser step.

    After each step gates adapt to what they measured, see ``AdaptiveGate``. In every ``EVERY``-th step the layers with
    ``execution=auto`` choose how experts are executed: by the routing alone, never by measured time, so that a repeated
    run makes the same choices.
    """

    EVERY = 50

    def __init__(self) -> None:
        self._measured: list[tuple[AdaptiveGate, Tensor]] = []  # since the last step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        network: Any = pl_module.network
        for routings in outputs["routings"].values():
            self._measured += [pair for routing in routings for pair in routing.measured]
        if not did_step(trainer, batch_idx):
            return
        if self._measured:
            update_adaptive_gates(network, self._measured)
            self._measured = []
        for name, routings in outputs["routings"].items() if (trainer.global_step - 1) % self.EVERY == 0 else ():
            layer = network.get_submodule(name)
            if isinstance(layer, MixtureOfExperts) and all(routing.exact_zeros for routing in routings):
                layer.dispatch.adapt(*(routing.weights.detach() for routing in routings))
