"""What a GPU does in another way than a CPU; these tests take part where there is one."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, Gate, SoftmaxGate, TopKGate
from mtl.linear import grouped_linear
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, Categorical, DataSpec, TaskSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SPEC = DataSpec(
    {"user": Categorical(50), "item": Categorical(60)},
    [TaskSpec("a", "binary", weight=0.9), TaskSpec("b", "regression", weight=0.1)],
)


def network(gate: type[Gate], execution: str) -> MMoE:
    torch.manual_seed(0)
    net = MMoE(
        SPEC,
        8,
        partial(TabularBottom, embedding_dim=32),
        partial(StackedDense, units=[64], dropout=0.5),
        gate,
        partial(Heads, units=[64], dropout=0.5),
        execution=execution,
    )
    return net.cuda()


def batch(rows: int) -> Batch:
    inputs = {"user": torch.randint(50, (rows,), device="cuda"), "item": torch.randint(60, (rows,), device="cuda")}
    return Batch(inputs, {"a": torch.ones(rows, device="cuda"), "b": torch.rand(rows, device="cuda")})


@pytest.mark.parametrize("gate", [SoftmaxGate, CometGate])
def test_a_dense_step_never_waits_for_the_device(gate: type[Gate]) -> None:
    module = MultiTaskModule(network(gate, "dense"), SPEC.tasks, partial(torch.optim.Adam, fused=True)).cuda()
    module.log = lambda *args, **kwargs: None
    optimizer, rows = module.configure_optimizers(), batch(256)

    def step() -> None:
        optimizer.zero_grad()
        module.training_step(rows, 0)["loss"].backward()
        optimizer.step()

    step()  # constants are copied once
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sparse_equals_dense() -> None:
    results = []
    for execution in ("dense", "sparse"):
        net, rows = network(partial(TopKGate, k=2), execution), batch(200)
        torch.manual_seed(1)
        predictions = net(rows.inputs).predictions
        sum(p.cos().sum() for p in predictions.values()).backward()
        results.append([*predictions.values(), *(p.grad for p in net.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
def test_grouped_linear_in_half_precision(autocast: bool) -> None:
    counts = [0, 40, 8, 100]
    dtype = torch.float32 if autocast else torch.bfloat16
    x = torch.randn(sum(counts), 64, device="cuda", dtype=dtype)
    weight, bias = (torch.randn(4, 32, *more, device="cuda", dtype=dtype) for more in ([64], []))
    values = []
    for device in ("cuda", "cpu"):  # one kernel, or a product for each group
        arguments = [value.to(device).requires_grad_() for value in (x, weight, bias)]
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = grouped_linear(*arguments, counts)
        values.append([y.float().cpu(), *(g.cpu() for g in torch.autograd.grad(y.float().square().mean(), arguments))])
    for one, other in zip(*values, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=0.1, rtol=0.05)
