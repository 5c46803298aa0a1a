"""The weights of many experts lie otherwise in memory: gradients, optimizers and checkpoints go along with that."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from mtl.experts.dense import MANY_EXPERTS, StackedDense
from mtl.experts.dispatch import Dispatch
from mtl.module import MultiTaskModule
from mtl.types import Routing, TaskSpec
from tests.routing import random_weights


@pytest.mark.parametrize("experts", [8, MANY_EXPERTS])
def test_gradients_lie_as_their_parameters(experts: int) -> None:
    """Else autograd would copy each, and a fused optimizer take them for others."""
    layer = StackedDense(experts, 6, [7, 5])
    seen: list[bool] = []
    for parameter in layer.parameters():
        parameter.register_hook(lambda gradient, like=parameter: seen.append(gradient.stride() == like.stride()))
    for execution in ("dense", "sparse"):
        Dispatch(execution)(layer, torch.randn(9, 6), Routing(random_weights(9, 2, experts, 2))).sum().backward()
    assert seen == [True] * 8


def test_many_experts_move_as_few_do() -> None:
    """Steps of a fused optimizer, of weights that lie either way."""
    torch.manual_seed(0)
    layer, x = StackedDense(MANY_EXPERTS, 6, [7, 5]), torch.randn(40, 6)
    weights = random_weights(40, 2, MANY_EXPERTS, 2)
    other = copy.deepcopy(layer)
    for linear in other.layers:
        linear.weight = torch.nn.Parameter(linear.weight.detach().contiguous())
    assert not layer.layers[0].weight.is_contiguous()
    assert other.layers[0].weight.is_contiguous()
    for experts, execution in ((layer, "sparse"), (other, "dense")):
        optimizer = torch.optim.Adam(experts.parameters(), 0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            Dispatch(execution)(experts, x, Routing(weights)).square().sum().backward()
            optimizer.step()
    for name, value in other.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], value, atol=1e-4, rtol=1e-4)
    other.load_state_dict(layer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True))


def test_loaded_optimizer_state_lies_as_its_parameter() -> None:
    """A fused optimizer goes through memory: state in another order would move other weights."""
    experts = StackedDense(MANY_EXPERTS, 6, [7])
    module = MultiTaskModule(experts, [TaskSpec("a", "regression")], partial(torch.optim.Adam, lr=0.1, fused=True))
    twin = copy.deepcopy(module)
    one, other = module.configure_optimizers(), twin.configure_optimizers()
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    one.step()
    twin.load_state_dict(module.state_dict())
    state = copy.deepcopy(one.state_dict())
    for values in state["state"].values():
        values.update({name: value.contiguous() for name, value in values.items()})
    other.load_state_dict(state)
    for parameter, like in zip(twin.parameters(), module.parameters(), strict=True):
        parameter.grad = like.grad.clone()
    one.step()
    other.step()
    assert not experts.layers[0].weight.is_contiguous()
    for parameter, like in zip(twin.parameters(), module.parameters(), strict=True):
        assert torch.equal(parameter, like)
