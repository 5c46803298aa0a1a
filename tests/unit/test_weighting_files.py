"""Every weighting of ``conf/weighting``: it trains, accumulates batches, resumes, and differs from the others."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from torch import Tensor

from mtl.training.module import MultiTaskModule
from tests.conftest import ROOT
from tests.weightings import (
    ROWS,
    TASKS,
    backward,
    batch,
    close,
    module,
    task_losses,
)

FILES = sorted(path.stem for path in (ROOT / "conf/weighting").glob("*.yaml"))


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("stch", "geometric_mean")])
def test_accumulated_batches_equal_the_whole(name: str) -> None:
    whole, halves = batch(), [batch(), batch()]
    for index, half in enumerate(halves):
        rows = slice(index * ROWS // 2, (index + 1) * ROWS // 2)
        half.inputs = {key: value[rows] for key, value in half.inputs.items()}
        half.targets = {key: value[rows] for key, value in half.targets.items()}
    close(backward(module(name), *halves, step=2), backward(module(name), whole, step=2))


def train(own: MultiTaskModule, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(own, batch(seed=step % 4, without="kind" if step % 4 == 2 else ""), step=step)
        assert all(bool(torch.isfinite(p.grad).all()) for p in own.parameters() if p.grad is not None)
        optimizer.step()
        if step % 4 == 3:
            own.weighting.end_epoch()


@pytest.mark.parametrize("name", FILES)
def test_losses_fall_and_a_resumed_run_goes_on_to_the_bit(name: str) -> None:
    """Also without the labels of a task in some steps."""
    whole, part, resumed = module(name), module(name), module(name)
    optimizers = [own.configure_optimizers() for own in (whole, part, resumed)]
    train(whole, optimizers[0], range(11))
    train(part, optimizers[1], range(6))
    file = io.BytesIO()
    torch.save([part.state_dict(), optimizers[1].state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved[0])
    optimizers[2].load_state_dict(saved[1])
    torch.manual_seed(99)
    train(resumed, optimizers[2], range(6, 11))
    expected = whole.state_dict()
    for key, value in resumed.state_dict().items():
        assert torch.equal(value, expected[key]) if isinstance(value, Tensor) else True, key
    assert task_losses(whole, batch()).sum() < task_losses(module(), batch()).sum()
    if whole.weighting.in_force is not None:
        assert whole.weighting.in_force.shape == (len(TASKS),)


def test_methods_differ_from_each_other() -> None:
    """Only those agree that mean the same: a sum, and what starts with equal weights."""
    equal = {"fixed", "sum", "dwa", "imtl_l", "gradnorm"}
    found = {name: torch.cat([g.flatten() for g in backward(module(name), batch()).values()]) for name in FILES}
    for left, right in itertools.combinations(FILES, 2):
        same = bool(torch.allclose(found[left], found[right], rtol=1e-6, atol=1e-9))
        assert same == ({left, right} <= equal or {left, right} == {"upgrad", "cr_mogm"}), (left, right)
