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


@pytest.mark.parametrize("name", FILES)
def test_training_with_every_file(name: str) -> None:
    """Losses fall, stay finite without the labels of a task, and another seed of the weighting matters if any."""
    own = module(name)
    optimizer = own.configure_optimizers()
    for step in range(12):
        backward(own, batch(seed=step % 4, without="kind" if step % 4 == 2 else ""), step=step)
        assert all(bool(torch.isfinite(p.grad).all()) for p in own.parameters() if p.grad is not None)
        optimizer.step()
        if step % 4 == 3:
            own.weighting.end_epoch()
    losses = [task_losses(each, batch()) for each in (own, module())]
    assert bool(torch.isfinite(losses[0]).all())
    assert losses[0].sum() < losses[1].sum()
    if own.weighting.in_force is not None:
        assert own.weighting.in_force.shape == (len(TASKS),)


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("stch", "geometric_mean")])
def test_accumulated_batches_equal_the_whole(name: str) -> None:
    whole, halves = batch(), [batch(), batch()]
    for index, half in enumerate(halves):
        rows = slice(index * ROWS // 2, (index + 1) * ROWS // 2)
        half.inputs = {key: value[rows] for key, value in half.inputs.items()}
        half.targets = {key: value[rows] for key, value in half.targets.items()}
    close(backward(module(name), *halves, step=2), backward(module(name), whole, step=2))


@pytest.mark.parametrize("name", FILES)
def test_a_resumed_run_goes_on_to_the_bit(name: str) -> None:
    def train(own: MultiTaskModule, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            backward(own, batch(seed=step), step=step)
            optimizer.step()
            if step % 2:
                own.weighting.end_epoch()

    whole, part = module(name), module(name)
    optimizers = [own.configure_optimizers() for own in (whole, part)]
    train(whole, optimizers[0], range(9))
    train(part, optimizers[1], range(6))
    file = io.BytesIO()
    torch.save([part.state_dict(), optimizers[1].state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = module(name)
    optimizer = resumed.configure_optimizers()
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.manual_seed(99)
    train(resumed, optimizer, range(6, 9))
    expected = whole.state_dict()
    for key, value in resumed.state_dict().items():
        assert torch.equal(value, expected[key]) if isinstance(value, Tensor) else True, key
    train(whole, optimizers[0], range(9, 11))
    train(resumed, optimizer, range(9, 11))
    for left, right in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_methods_differ_from_each_other() -> None:
    """Only those agree that mean the same: a sum, and what starts with equal weights."""
    equal = {"fixed", "sum", "dwa", "imtl_l", "gradnorm"}
    found = {name: torch.cat([g.flatten() for g in backward(module(name), batch()).values()]) for name in FILES}
    for left, right in itertools.combinations(FILES, 2):
        same = bool(torch.allclose(found[left], found[right], rtol=1e-6, atol=1e-9))
        assert same == ({left, right} <= equal or {left, right} == {"upgrad", "cr_mogm"}), (left, right)
