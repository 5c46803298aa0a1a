"""A trainer of precision bf16-true or 16-true converts the network, and rounds nothing that counts or anneals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader

from mtl.gates import SoftmaxSelectorGate
from mtl.gates.permuted import Permutation
from mtl.networks.bottom import bottom_for
from mtl.networks.components import DenseLayers
from mtl.networks.heads import Heads
from mtl.networks.routed import RoutedNetwork
from mtl.training.module import MultiTaskModule
from mtl.training.weighting import GradNorm, LossWeighting
from mtl.types import Batch, DataSpec, Numeric, TaskSpec
from tests.gate_cases import CASES, GateCase

TASK = TaskSpec("kind", "multiclass", num_classes=3)
SPEC = DataSpec({"x": Numeric(4)}, [TASK])
every_gate = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def module() -> MultiTaskModule:
    layers = [{"components": [partial(DenseLayers, units=[5])] * 4}]
    permutation = partial(Permutation, tau=1 / 3, rounds=257)
    gate = partial(SoftmaxSelectorGate, temperature=1 / 3)
    network = RoutedNetwork(SPEC, bottom_for, layers, gate, Heads, permutation=permutation)
    return MultiTaskModule(network, [TASK], partial(torch.optim.SGD, lr=0.01))


@pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning")  # of few workers
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_a_resumed_run_in_half_precision_counts_and_anneals_exactly(precision: Any, tmp_path: Path) -> None:
    batch = Batch({"x": torch.randn(257, 4)}, {"kind": torch.randint(3, (257,))})
    loader = DataLoader([batch] * 5, batch_size=None)
    options = {"precision": precision, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}

    file = tmp_path / "in_mid_epoch.ckpt"

    def save(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(file)

    def fit(path: Path | None) -> MultiTaskModule:
        trained, trainer = module(), Trainer(max_epochs=1, callbacks=LambdaCallback(on_train_batch_end=save), **options)
        trainer.fit(trained, loader, DataLoader([batch], batch_size=None), ckpt_path=path)
        assert next(trained.network.parameters()).dtype in (torch.bfloat16, torch.float16)
        return trained

    fit(None)
    trained = fit(file)
    gate = trained.network.layers[0].gate
    assert trained.train_meter.sums[1].tolist() == [5 * 257]
    assert (float(gate.permutation.tau), float(gate.permutation.rounds)) == (1 / 3, 257)
    assert gate.gate.temperature == torch.tensor(1 / 3)


@every_gate
def test_gates_convert_their_parameters_and_keep_their_buffers(case: GateCase) -> None:
    torch.manual_seed(0)
    gate = case.build(3, 6, 5 if case.looks else None)
    for buffer in gate.buffers():
        if buffer.is_floating_point():
            buffer.mul_(3).div_(7)  # no round numbers
    before = {name: buffer.clone() for name, buffer in gate.named_buffers()}
    for parameter in gate.parameters():
        parameter.grad = torch.ones_like(parameter)
    gate.to(torch.bfloat16)
    assert all(parameter.dtype == parameter.grad.dtype == torch.bfloat16 for parameter in gate.parameters())
    assert all(torch.equal(buffer, before[name]) for name, buffer in gate.named_buffers())
    assert all(b.dtype == torch.float64 for b in gate.double().buffers() if b.is_floating_point())  # digits are gained


def test_weightings_keep_the_losses_that_they_compare_with() -> None:
    network = nn.Linear(2, 2)
    scalarizer = nn.Module()
    scalarizer.register_buffer("least", torch.full((2,), 1 / 3))
    for weighting, name in ((GradNorm(network, 2), "first"), (LossWeighting(network, 2, scalarizer), "latest")):
        getattr(weighting, name).fill_(1 / 3)
        weighting.to(torch.bfloat16)
        assert getattr(weighting, name).tolist() == torch.full((2,), 1 / 3).tolist()
    assert scalarizer.least.dtype == torch.float32
