"""Schedules of the learning rate and of buffers: shapes by hand, lengths, base rates of several groups, plateaus."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mtl.callbacks.epoch_report import time_left
from mtl.callbacks.lr_schedule import LearningRate, PlateauRate
from mtl.callbacks.monitoring import MonitorCheck
from mtl.callbacks.phase_length import PhaseLength, did_step, epochs_left
from mtl.callbacks.scheduled_buffer import ScheduledBuffer

from mtl.checks import InputError
from mtl.gates import SoftmaxSelectorGate
from mtl.training.module import MultiTaskModule
from mtl.training.schedules import SHAPES, lr_factor_at
from mtl.types import TaskSpec
from tests.standins import Recorder, bare_network, trainer

MIDDLE = {"constant": 1.0, "linear": 50.5, "log_linear": 10.0, "cosine": 50.5, "inverse_sqrt": 1 / math.sqrt(0.50005)}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    """They start and end at the given values, whose middle is known, and rise or fall between."""
    function = SHAPES[shape]
    assert [function(at, 20.0, 0.5) for at in (0.0, 1.0)] == pytest.approx([20.0, 0.5])
    assert function(0.5, 1.0, 100.0) == pytest.approx(MIDDLE[shape])
    rising, falling = ([function(i / 20, *ends) for i in range(21)] for ends in ((1.0, 7.0), (7.0, 1.0)))
    assert (rising, falling) == (sorted(rising), sorted(falling, reverse=True))
    assert all(function(i / 5, 3.0, 3.0) == pytest.approx(3.0) for i in range(6))


HALF = math.sqrt(0.5) / 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((4, 14, "linear", 0.2), [0, 0.25, 0.5, 0.75, *(1 - 0.08 * step for step in range(10)), 0.2, 0.2]),
        ((2, 6, "cosine", 0.0), [0, 0.5, 1, 0.5 + HALF, 0.5, 0.5 - HALF, 0]),
        ((0, math.inf, "constant", 1.0), [1, 1, 1]),
        ((3, 3, "linear", 0.0), [0, 1 / 3, 2 / 3, 1, 0, 0]),
    ],
)
def test_rates_by_hand(options: Any, expected: list[float]) -> None:
    assert [lr_factor_at(step, *options) for step in range(len(expected))] == pytest.approx(expected)


def test_one_cycle_is_that_of_torch() -> None:
    """Torch has the peak and the end a step earlier."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, 100, 0.3, "cos", cycle_momentum=False, div_factor=25, final_div_factor=400
    )
    for step in range(100):
        ours = lr_factor_at(step, 29, 99, "cosine", 1e-4, "cosine", 1 / 25)
        assert ours == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step() if step < 99 else None


def optimising(step: int, *rates: float, **options: Any) -> Any:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.1,)]
    return trainer(step, optimizers=[torch.optim.SGD(groups, lr=0.1)], **options)


def rates_at(callback: LearningRate, run: Any) -> list[float]:
    module = Recorder()
    callback.on_train_start(run, module)
    callback.on_train_batch_start(run, module, None, 0)
    rates = [group["lr"] for group in run.optimizers[0].param_groups]
    assert module.logged["train/lr"] == pytest.approx(rates[0])
    return rates


def with_gate() -> Recorder:
    return Recorder(torch.nn.ModuleDict({"gate": SoftmaxSelectorGate(1, 4)}))


def test_each_group_keeps_its_base_rate() -> None:
    callback, run = LearningRate("linear", warmup=0.2), optimising(2, 0.1, 0.4)
    assert rates_at(callback, run) == pytest.approx([0.05, 0.2])
    for step, factor in ((4, 1), (12, 0.5), (20, 0)):  # of 20 steps; the base rates are not those of the step before
        run.global_step = step
        assert rates_at(callback, run) == pytest.approx([0.1 * factor, 0.4 * factor])


def test_resumed_rates() -> None:
    """The base rates of the groups survive in the optimiser's state."""
    make = partial(LearningRate, "cosine", 1e-4, 0.3, rise="cosine", start_factor=0.04)
    factor = 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * 9 / 14)) / 2
    run, again = optimising(10, 0.1, 0.4), optimising(15, 0.1, 0.4)
    rates_at(make(), run)
    again.optimizers[0].load_state_dict(run.optimizers[0].state_dict())
    assert rates_at(make(), again) == pytest.approx([0.1 * factor, 0.4 * factor])


def test_the_time_left_is_that_of_the_epochs_left() -> None:
    run = SimpleNamespace(max_epochs=100, max_steps=-1, current_epoch=0, global_step=30)
    assert epochs_left(run) == 99
    run.max_steps, run.current_epoch = 75, 1  # 15 steps an epoch
    assert epochs_left(run) == 3
    run.max_steps, run.max_epochs = -1, -1
    assert epochs_left(run) is None
    assert time_left(7.0, 99, True) == "at most 12 minutes (99 epochs of 7 seconds; early stopping may end it sooner)"
    assert time_left(0.25, 1, False) == "about 0.25 seconds (1 epoch of 0.25 seconds)"
    assert time_left(130.0, 99.5, False) == "about 3.6 hours (100 epochs of 2.2 minutes)"


def test_lengths_count_optimiser_steps() -> None:
    accumulating = optimising(0, accumulate_grad_batches=4, max_epochs=5)  # steps on batches 4, 8 and 10
    assert [batch for batch in range(10) if did_step(accumulating, batch)] == [3, 7, 9]
    lengths = [PhaseLength("x", epochs=2), PhaseLength("x", fraction=0.4), PhaseLength("x", steps=5)]
    assert [length.in_steps(accumulating) for length in lengths] == [6, 6, 5]
    accumulating.max_steps = 10
    assert PhaseLength("x", fraction=0.5).in_steps(accumulating) == 5
    assert rates_at(LearningRate("cosine"), optimising(3, accumulate_grad_batches=4)) == pytest.approx([0.05])
    assert rates_at(LearningRate(), optimising(0)) == [0.1]
    endless = optimising(0, max_epochs=-1)
    assert rates_at(LearningRate(warmup_steps=2), endless) == [0]
    with pytest.raises(InputError, match=r"lr_schedule=linear.* needs trainer.max_epochs or trainer.max_steps"):
        rates_at(LearningRate("linear"), endless)


def validated(callback: PlateauRate, *values: float) -> list[float]:
    """Return the factor after each validation."""
    factors, module = [], MultiTaskModule(bare_network(), [TaskSpec("a", "binary")], None)
    for value in values:
        callback.on_value(trainer(50), module, value)
        factors.append(callback.factor_at(trainer(50), 50))
    return factors


def test_plateau_lowers_the_rate_after_its_patience() -> None:
    callback = PlateauRate(factor=0.5, patience=2)
    assert validated(callback, 3, 2, 2, 2, 2, 2, 1, 5, 5) == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]
    assert validated(PlateauRate(factor=0.1, patience=1, mode="max"), 1, 2, 2) == [1, 1, 0.1]
    assert validated(PlateauRate(factor=0.5, patience=1), math.nan, 2, math.nan, 1) == [1, 1, 1, 1]
    assert PlateauRate(warmup_steps=100).factor_at(trainer(50), 50) == 0.5


def test_state_of_a_plateau() -> None:
    first, second = (PlateauRate(factor=0.5, patience=2) for _ in range(2))
    validated(first, 3, 4, 4, 4)
    second.load_state_dict(first.state_dict())
    assert validated(second, 4, 2.5, 4) == [0.25, 0.25, 0.25]
    impatient = PlateauRate(factor=0.5, patience=1)  # a resumed run may get another patience
    impatient.load_state_dict(first.state_dict())
    assert validated(impatient, 4) == [0.25]


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(InputError, match=r"warmup=0.1 and callbacks.lr_schedule.warmup_steps=5: one of them must be 0"):
        LearningRate(warmup=0.1, warmup_steps=5)
    with pytest.raises(InputError, match=r"monitor=train/loss: must be a value of the validation"):
        PlateauRate(monitor="train/loss")
    module = SimpleNamespace(logged_names=lambda: ["val/loss"], config={})
    with pytest.raises(InputError, match=r"callbacks.lr_schedule.monitor=val/los: .* did you mean val/loss"):
        MonitorCheck().on_fit_start(SimpleNamespace(callbacks=[PlateauRate("val/los")]), module)


def scheduled(**options: Any) -> ScheduledBuffer:
    return ScheduledBuffer("network.gate.temperature", **{"start": 1.0, "end": 0.1} | options)


@pytest.mark.parametrize("options", [{"steps": 20}, {"epochs": 2}, {"fraction": 0.4}], ids=str)
def test_schedule_of_a_buffer_is_a_function_of_the_step_alone(options: dict[str, Any]) -> None:
    callback, module, seen = scheduled(**options), with_gate(), []
    callback.on_train_start(trainer(), module)
    for step in (10, 0, 99, 7):
        callback.on_train_batch_start(trainer(step, max_epochs=5), module, None, 0)
        seen.append(float(module.network.gate.temperature))
    assert seen == pytest.approx([0.55, 1.0, 0.1, 1 - 0.9 * 7 / 20])
    assert module.logged["train/schedule/gate.temperature"] == pytest.approx(seen[-1])


def test_schedule_without_its_target() -> None:
    with pytest.raises(InputError, match=r"gate\.temperature"):
        ScheduledBuffer("gate.nothing", 0, 1, epochs=1).on_train_start(trainer(), with_gate())
    callback = ScheduledBuffer("gate.nothing", 0, 1, epochs=1, required=False)
    callback.on_train_start(trainer(), with_gate())
    callback.on_train_batch_start(trainer(), with_gate(), None, 0)
    assert scheduled(steps=1).state_key != callback.state_key


def test_one_schedule_for_several_buffers() -> None:
    layers = torch.nn.ModuleList(SoftmaxSelectorGate(1, 4) for _ in range(3))
    module = Recorder(torch.nn.ModuleDict({"layers": layers}))
    callback = ScheduledBuffer("network.layers.*.temperature", 1.0, 0.5, steps=10)
    callback.on_train_start(trainer(), module)
    callback.on_train_batch_start(trainer(14), module, None, 0)
    assert [float(layer.temperature) for layer in layers] == [0.5] * 3
    assert module.logged == {"train/schedule/layers.all.temperature": 0.5}


@pytest.mark.parametrize(
    "options", [{"steps": 5, "epochs": 2}, {}, {"epochs": 0}, {"shape": "bent"}, {"shape": "log_linear", "end": 0.0}]
)
def test_bad_schedules(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"schedule|steps, epochs, fraction|shape|epochs"):
        scheduled(**options)
