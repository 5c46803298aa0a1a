"""A trainer of precision bf16-true or 16-true converts the network, and rounds nothing that counts or anneals.

Then regressions in standard units: loss, metrics, distillation and checkpoints.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.callbacks.sanity_guards import FiniteGuard
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from mtl.checks import InputError
from mtl.gates import SoftmaxSelectorGate
from mtl.gates.permuted import Permutation
from mtl.networks.base import MultiTaskNetwork
from mtl.networks.bottom import build_bottom
from mtl.networks.components import DenseLayers
from mtl.networks.heads import Heads
from mtl.networks.mixture import group_means
from mtl.networks.routed import RoutedNetwork
from mtl.training.distillation import Distillation
from mtl.training.evaluation import Evaluation
from mtl.training.module import MultiTaskModule
from mtl.training.weighting import GradNorm, LossWeighting
from mtl.types import Batch, DataSpec, NetworkOutput, Numeric, TaskSpec
from tests.gate_cases import CASES, GateCase
from tests.losses import summed_loss
from tests.standins import bare_network

TASK = TaskSpec("kind", "multiclass", num_classes=3)
SPEC = DataSpec({"x": Numeric(4)}, [TASK])
QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False}
every_gate = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def module() -> MultiTaskModule:
    layers = [{"components": [partial(DenseLayers, units=[5])] * 4}]
    permutation = partial(Permutation, tau=1 / 3, rounds=257)
    gate = partial(SoftmaxSelectorGate, temperature=1 / 3)
    network = RoutedNetwork(SPEC, build_bottom, layers, gate, Heads, permutation=permutation)
    return MultiTaskModule(network, [TASK], partial(torch.optim.SGD, lr=0.01))


@pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning")  # of few workers
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_a_resumed_run_in_half_precision_counts_and_anneals_exactly(precision: Any, tmp_path: Path) -> None:
    batch = Batch({"x": torch.randn(257, 4)}, {"kind": torch.randint(3, (257,))})
    loader = DataLoader([batch] * 5, batch_size=None)
    file = tmp_path / "in_mid_epoch.ckpt"

    def save(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(file)

    def fit(path: Path | None) -> MultiTaskModule:
        trained = module()
        trainer = Trainer(max_epochs=1, precision=precision, callbacks=LambdaCallback(on_train_batch_end=save), **QUIET)
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


def test_means_of_groups_count_beyond_256_in_bfloat16() -> None:
    x, groups = torch.ones(600, 2, dtype=torch.bfloat16), torch.arange(600) // 400
    assert group_means(x, groups, 3).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_weightings_keep_the_losses_that_they_compare_with() -> None:
    network = bare_network()
    scalarizer = nn.Module()
    scalarizer.register_buffer("least", torch.full((2,), 1 / 3))
    for weighting, name in ((GradNorm(network, 2), "first"), (LossWeighting(network, 2, scalarizer), "latest")):
        getattr(weighting, name).fill_(1 / 3)
        weighting.to(torch.bfloat16)
        assert getattr(weighting, name).tolist() == torch.full((2,), 1 / 3).tolist()
    assert scalarizer.least.dtype == torch.float32


PRICE = TaskSpec("price", "regression", mean=1000.0, std=250.0)
OUTPUT = torch.tensor([0.0, 1.0, -2.0, 0.5])
TARGET = torch.tensor([1000.0, 1500.0, math.nan, 1000.0])


def test_the_loss_is_in_standard_units_and_metrics_are_in_those_of_the_task() -> None:
    total, count = summed_loss(PRICE, OUTPUT, TARGET)
    assert (float(total), int(count)) == (0 + 1 + 0.25, 3)  # errors of 0, -1 and 0.5 standard deviations
    evaluation = Evaluation([PRICE])
    evaluation.update({"price": OUTPUT}, {"price": TARGET})
    found = evaluation.compute()
    assert found["price/loss"] == pytest.approx(1.25 / 3)
    assert found["price/mse"] == pytest.approx((250**2 + 125**2) / 3)
    assert PRICE.unstandardize(OUTPUT).tolist() == [1000, 1250, 500, 1125]
    torch.testing.assert_close(PRICE.standardize(PRICE.unstandardize(OUTPUT)), OUTPUT.double())


def test_large_units_do_not_overflow_in_half_precision() -> None:
    task = TaskSpec("x", "regression", mean=1e9, std=1e8)
    evaluation = Evaluation([task])
    evaluation.update({"x": torch.ones(2, dtype=torch.float16)}, {"x": torch.full((2,), 1.1e9)})
    assert evaluation.compute() == pytest.approx({"loss": 0, "x/loss": 0, "x/mse": 0}, abs=1e-9)


class Constant(MultiTaskNetwork):
    """Predict ``output`` for each task."""

    def __init__(self, output: float) -> None:
        super().__init__(DataSpec({}, [PRICE]))
        self.output = nn.Parameter(torch.tensor(output))

    def forward(self, inputs: Any, tasks: Any = None) -> NetworkOutput:
        return NetworkOutput({"price": self.output.expand(len(inputs["x"]))})


def test_a_teacher_of_other_units_is_compared_in_those_of_the_network() -> None:
    inputs = {"x": torch.zeros(3)}
    output = Constant(0.5)(inputs)
    same = Distillation(Constant(2.0), [PRICE], layers=False).losses(inputs, output)
    raw = [TaskSpec("price", "regression")]  # of a teacher that was trained on the labels as they are
    other = Distillation(Constant(1500.0), [PRICE], layers=False, teacher_tasks=raw).losses(inputs, output)
    assert float(same["distillation_predictions"].detach()) == pytest.approx(1.5**2)
    assert float(other["distillation_predictions"].detach()) == pytest.approx(1.5**2)


class Noting(Constant):
    """Keep the inputs of each call."""

    def forward(self, inputs: Any, tasks: Any = None) -> NetworkOutput:
        self.seen = inputs
        return super().forward(inputs, tasks)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*")
def test_the_precision_of_the_trainer_is_for_inputs_and_leaves_labels_exact(precision: str, tmp_path: Path) -> None:
    numbers = torch.tensor([257.0, 4097.0])  # 256 and 4096 in bfloat16
    batches: list[Batch] = []

    class NotingModule(MultiTaskModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batches.extend(batch)
            return super().training_step(batch, batch_idx)

        validation_step = None

    trainer = Trainer(precision=precision, max_steps=1, default_root_dir=tmp_path, **QUIET)
    batch = Batch({"x": numbers, "id": torch.arange(2)}, {"price": numbers.double()}, {"price": numbers})
    module = NotingModule(Noting(0.0), [PRICE], torch.optim.SGD)
    trainer.fit(module, DataLoader([[batch, copy.deepcopy(batch)]], batch_size=None))
    assert module.network.seen["x"].dtype == module.network.output.dtype
    assert module.network.seen["id"].dtype == torch.int64
    assert len(batches) == 2
    for part in batches:
        assert torch.equal(part.targets["price"], numbers.double())
        assert torch.equal(part.weights["price"], numbers)


class Steep(LightningModule):
    """One weight with the given gradient."""

    def __init__(self, gradient: float) -> None:
        super().__init__()
        self.weight, self.gradient = nn.Parameter(torch.ones(())), gradient

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight * self.gradient + (1e-30 - self.gradient)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-34)


@pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning")  # of few workers
def test_an_overflow_of_scaled_gradients_skips_the_step(tmp_path: Path) -> None:
    """And no guard stops the run, unless the gradients stay infinite."""
    loader = DataLoader([0] * 60, batch_size=None)
    for gradient, steps in ((1e34, 3), (math.inf, 60)):
        scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        scaled.forward_context = nullcontext  # the module says which gradients overflow
        trainer = Trainer(
            max_steps=steps, plugins=[scaled], callbacks=[FiniteGuard()], default_root_dir=tmp_path, **QUIET
        )
        own = Steep(gradient)
        with nullcontext() if steps == 3 else pytest.raises(InputError, match=r"step 17: the loss is nan; all weights"):
            trainer.fit(own, loader)
        assert scaled.scaler.get_scale() == (2.0**15 if steps == 3 else 0.5)
        assert (own.weight != 1) == (steps == 3)
