"""The dense path as torch.compile sees it: one graph, and the numbers of the path that is not compiled."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, DSelectKGate, Gate, SoftmaxGate, SoftmaxSelectorGate, TaskTop1Gate, TopKGate
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.types import Categorical, DataSpec, TaskSpec

SPEC = DataSpec({"user": Categorical(20), "item": Categorical(30)}, [TaskSpec("a", "binary"), TaskSpec("b", "binary")])
BREAKS = {
    SoftmaxGate: 0,
    TopKGate: 0,
    SoftmaxSelectorGate: 0,
    TaskTop1Gate: 0,
    DSelectKGate: 0,
    CometGate: 0,
}


def network(gate: type[Gate]) -> MMoE:
    torch.manual_seed(0)
    return MMoE(
        SPEC,
        4,
        partial(TabularBottom, embedding_dim=4),
        partial(StackedDense, units=[6, 5], dropout=0.5),
        gate,
        partial(Heads, units=[3], dropout=0.5),
        execution="dense",
    )


def results(net: MMoE) -> list[Tensor]:
    torch.manual_seed(1)
    output = net({"user": torch.arange(20), "item": torch.arange(20)})
    losses = [p.cos().sum() for p in output.predictions.values()] + list(output.losses.values())
    torch.stack(losses).sum().backward()
    return [*output.predictions.values(), *(parameter.grad for parameter in net.parameters())]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # inside torch's compiler
@pytest.mark.parametrize("gate", BREAKS, ids=[gate.__name__ for gate in BREAKS])
def test_graph_breaks_and_numbers(gate: type[Gate]) -> None:
    torch._dynamo.reset()
    plain, compiled = network(gate), network(gate)
    found = torch._dynamo.explain(compiled)({"user": torch.arange(20), "item": torch.arange(20)})
    assert found.graph_break_count == BREAKS[gate], found.break_reasons
    torch._dynamo.reset()
    compiled.compile(backend="aot_eager")
    for one, other in zip(results(plain), results(compiled), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert plain.state_dict().keys() == compiled.state_dict().keys()
