"""Learning-rate schedules: shapes by hand, base rates of several groups, plateaus, bad options."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mtl.callbacks.lr_schedule import LearningRate, PlateauRate
from mtl.callbacks.monitored import MonitorCheck

from mtl.checks import InputError
from mtl.config import schema
from mtl.training.schedules import rate_factor
from tests.integration.helpers import compose_small


def test_linear_by_hand() -> None:
    """Four steps of warm-up, then ten of decay to a fifth."""
    rates = [rate_factor(step, 4, 14, "linear", 0.2) for step in range(16)]
    warm, decay = [0, 0.25, 0.5, 0.75], [1 - 0.08 * step for step in range(10)]
    assert rates == pytest.approx([*warm, *decay, 0.2, 0.2])


def test_cosine_by_hand() -> None:
    rates = [rate_factor(step, 2, 6, "cosine", 0.0) for step in range(7)]
    half = math.sqrt(0.5) / 2
    assert rates == pytest.approx([0, 0.5, 1, 0.5 + half, 0.5, 0.5 - half, 0])


def test_one_cycle_by_hand() -> None:
    """Three steps up from a fifth, and six down to a tenth."""
    up, down = [0.2, 0.4, 0.8], [1, 1 - 0.45 * (1 - math.sqrt(0.75)), 1 - 0.45 / 2, 0.55, 0.55 - 0.45 / 2]
    rates = [rate_factor(step, 3, 9, "cosine", 0.1, "cosine", 0.2) for step in range(11)]
    assert rates == pytest.approx([*up, *down, 0.55 - 0.45 * math.sqrt(0.75), 0.1, 0.1])


def test_one_cycle_is_that_of_torch() -> None:
    """Torch has the peak and the end a step earlier."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, 100, 0.3, "cos", cycle_momentum=False, div_factor=25, final_div_factor=400
    )
    for step in range(100):
        ours = rate_factor(step, 29, 99, "cosine", 1e-4, "cosine", 1 / 25)
        assert ours == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step() if step < 99 else None


def test_lengths_without_decay_or_warmup() -> None:
    assert [rate_factor(step, 0, math.inf, "constant", 1.0) for step in (0, 5)] == [1, 1]
    assert [rate_factor(step, 3, 3, "linear", 0.0) for step in (0, 2, 3, 4, 9)] == pytest.approx([0, 2 / 3, 1, 0, 0])


def trainer(step: int, *rates: float, batches: int = 10, accumulate: int = 1) -> Any:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.1,)]
    return SimpleNamespace(
        global_step=step,
        num_training_batches=batches,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
        max_epochs=2,
        max_steps=-1,
        optimizers=[torch.optim.SGD(groups, lr=0.1)],
    )


def rates_at(callback: LearningRate, run: Any) -> list[float]:
    module = SimpleNamespace(logged={}, log=lambda name, value, **how: module.logged.update({name: value}))
    callback.on_train_start(run, module)
    callback.on_train_batch_start(run, module, None, 0)
    rates = [group["lr"] for group in run.optimizers[0].param_groups]
    assert module.logged["while_training/lr"] == pytest.approx(rates[0])
    return rates


def test_each_group_keeps_its_base_rate() -> None:
    callback = LearningRate("linear", warmup=0.2)
    run = trainer(2, 0.1, 0.4)
    assert rates_at(callback, run) == pytest.approx([0.05, 0.2])
    for step, factor in ((4, 1), (12, 0.5), (20, 0)):  # of 20 steps; the base rates are not those of the step before
        run.global_step = step
        assert rates_at(callback, run) == pytest.approx([0.1 * factor, 0.4 * factor])


ONE_CYCLE = partial(LearningRate, "cosine", 1e-4, 0.3, rise="cosine", start_factor=0.04)


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (partial(LearningRate, warmup_steps=18), 15 / 18),
        (partial(LearningRate, "linear"), 0.25),
        (partial(LearningRate, "cosine"), 0.5 - math.sqrt(0.125)),
        (ONE_CYCLE, 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * 9 / 14)) / 2),
        (partial(PlateauRate, warmup_steps=18), 15 / 18),
    ],
    ids=["constant", "linear", "cosine", "one_cycle", "plateau"],
)
def test_resumed_rates(make: Callable[[], LearningRate], factor: float) -> None:
    """The base rates of the groups survive in the optimiser's state."""
    run, again = trainer(10, 0.1, 0.4), trainer(15, 0.1, 0.4)
    rates_at(make(), run)
    again.optimizers[0].load_state_dict(run.optimizers[0].state_dict())
    assert rates_at(make(), again) == pytest.approx([0.1 * factor, 0.4 * factor])


def test_lengths_count_optimiser_steps() -> None:
    assert rates_at(LearningRate("cosine"), trainer(3, batches=10, accumulate=4)) == pytest.approx([0.05])
    assert rates_at(LearningRate(warmup_steps=4), trainer(3)) == pytest.approx([0.075])
    assert rates_at(LearningRate(), trainer(0)) == [0.1]
    endless = trainer(0)
    endless.max_epochs = -1
    assert rates_at(LearningRate(warmup_steps=2), endless) == [0]
    with pytest.raises(InputError, match=r"lr_schedule=linear.* needs trainer.max_epochs or trainer.max_steps"):
        rates_at(LearningRate("linear"), endless)


def validated(callback: PlateauRate, *values: float, sanity: bool = False) -> list[float]:
    """Return the factor after each validation."""
    factors = []
    for value in values:
        metrics = {"val/loss": torch.tensor(value)}
        callback.on_validation_end(SimpleNamespace(sanity_checking=sanity, callback_metrics=metrics), None)
        factors.append(callback.factor_at(trainer(50), 50))
    return factors


def test_plateau_lowers_the_rate_after_its_patience() -> None:
    callback = PlateauRate(factor=0.5, patience=2)
    assert validated(callback, 3, 2, 2, 2, 2, 2, 1, 5, 5) == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]
    assert validated(PlateauRate(factor=0.1, patience=1, mode="max"), 1, 2, 2) == [1, 1, 0.1]
    assert validated(PlateauRate(patience=1), 1, 1, sanity=True) == [1, 1]
    assert PlateauRate(warmup_steps=100).factor_at(trainer(50), 50) == 0.5


def test_state_of_a_plateau() -> None:
    first, second = (PlateauRate(factor=0.5, patience=2) for _ in range(2))
    validated(first, 3, 4, 4, 4)
    second.load_state_dict(first.state_dict())
    assert validated(second, 4, 2.5, 4) == [0.25, 0.25, 0.25]
    impatient = PlateauRate(factor=0.5, patience=1)  # a resumed run may get another patience
    impatient.load_state_dict(first.state_dict())
    assert validated(impatient, 4) == [0.25]


def test_unknown_monitor_stops_the_run_before_its_first_step() -> None:
    module = SimpleNamespace(logged_names=lambda: ["val/loss"], config={})
    with pytest.raises(InputError, match=r"callbacks.lr_schedule.monitor=val/los: .* Did you mean val/loss"):
        MonitorCheck().on_fit_start(SimpleNamespace(callbacks=[PlateauRate("val/los")]), module)


@pytest.mark.parametrize(
    ("schedule", "option", "message"),
    [
        ("linear", "warmup=2", r"callbacks.lr_schedule.warmup=2: must be a number of at least 0 and at most 1"),
        ("constant", "warmup=abc", r"callbacks.lr_schedule.warmup=abc: must be a number"),
        ("cosine", "warmup_steps=-1", r"callbacks.lr_schedule.warmup_steps=-1: must be a whole number"),
        ("linear", "end_factor=1.5", r"callbacks.lr_schedule.end_factor=1.5: must be a number"),
        ("linear", "shape=bent", r"callbacks.lr_schedule.shape=bent: must be one of constant, linear, cosine"),
        ("one_cycle", "start_factor=2", r"callbacks.lr_schedule.start_factor=2: must be a number"),
        ("plateau", "factor=1", r"callbacks.lr_schedule.factor=1: must be a number"),
        ("plateau", "patience=0", r"callbacks.lr_schedule.patience=0: must be a whole number"),
    ],
)
def test_bad_options_give_one_message(schedule: str, option: str, message: str, tmp_path: Any) -> None:
    with pytest.raises(InputError, match=f"^{message}[^;]*$"):
        schema.check(compose_small(tmp_path, f"lr_schedule={schedule}", f"callbacks.lr_schedule.{option}"))


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(InputError, match=r"warmup=0.1 and callbacks.lr_schedule.warmup_steps=5: one of them must be 0"):
        LearningRate(warmup=0.1, warmup_steps=5)
    with pytest.raises(InputError, match=r"monitor=train/loss: must be a value of the validation"):
        PlateauRate(monitor="train/loss")
