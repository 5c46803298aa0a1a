"""What makes a device wait in a training step, counted without a device, and what a GPU does in another way."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, Gate, SoftmaxGate, TopKGate
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.nn.linear import grouped_linear, one_kernel
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, Categorical, DataSpec, TaskSpec

# Operations whose result, or its size, the CPU has to know before it goes on; tolist, item and float() call the first
WAITS = {"_local_scalar_dense", "nonzero", "unique2", "_unique2", "masked_select", "equal"}
SPEC = DataSpec(
    {"user": Categorical(50), "item": Categorical(60)},
    [TaskSpec("a", "binary", weight=0.9), TaskSpec("b", "regression", weight=0.1)],
)


class Watch(TorchDispatchMode):
    """Count all operations, and those that wait; a list that is read (``tolist``) waits once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.operations, self._reading = 0, False
        for name in ("tolist", "item", "cpu", "numpy"):
            monkeypatch.setattr(Tensor, name, self._watched(name, getattr(Tensor, name)))

    def _watched(self, name: str, method: Any) -> Any:
        def called(tensor: Tensor, *args: Any) -> Any:
            self.waits[name] += 1
            self._reading = True
            try:
                return method(tensor, *args)
            finally:
                self._reading = False

        return called

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.operations += 1
        self.waits[name] += name in WAITS and not self._reading
        if name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        ):
            self.waits["index by a mask"] += 1
        return func(*args, **(kwargs or {}))


class WatchSteps(Callback):
    """Watch each step of a training, from the batch to the end of the optimiser step."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.steps = watch, []

    def on_train_batch_start(self, *args: Any) -> None:
        self.watch.waits, self.watch.operations = Counter(), 0
        self.watch.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.watch.__exit__(None, None, None)
        self.steps.append((+self.watch.waits, self.watch.operations))


def steps(gate: type[Gate], execution: str, static: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    torch.manual_seed(0)
    parts: list[Any] = [partial(TabularBottom, embedding_dim=8), partial(StackedDense, units=[16], dropout=0.5)]
    heads = partial(Heads, units=[8], dropout=0.5)
    network = MMoE(SPEC, 4, *parts, gate, heads, static_gate=static, execution=execution)
    module = MultiTaskModule(network, SPEC.tasks, partial(torch.optim.Adam, fused=True))
    rows = [
        Batch(
            {"user": torch.randint(50, (64,)), "item": torch.randint(60, (64,))},
            {"a": torch.ones(64), "b": torch.rand(64)},
        )
        for _ in range(6)
    ]
    watch = WatchSteps(Watch(monkeypatch))
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", log_every_n_steps=50, callbacks=[watch], enable_model_summary=False, **options
    )
    trainer.fit(module, DataLoader(rows, batch_size=None))
    return watch.steps[1:-1]  # the first step copies constants, the last of an epoch is logged


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning: no validation, no workers
@pytest.mark.parametrize(
    ("gate", "execution", "static", "waits", "operations"),
    [
        (SoftmaxGate, "dense", False, {}, 299),
        (CometGate, "dense", False, {}, 455),
        (CometGate, "dense", True, {}, 426),
        (TopKGate, "sparse", False, {"tolist": 1}, 371),
        (CometGate, "sparse", False, {"tolist": 1}, 511),
    ],
)
def test_steps_that_wait_for_the_device(
    gate: type[Gate],
    execution: str,
    static: bool,
    waits: dict[str, int],
    operations: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two logged steps. ``benchmarks/speed.md`` has the numbers of operations; a smaller one replaces it."""
    for counted, number in steps(gate, execution, static, monkeypatch):
        assert counted == waits
        assert number <= operations


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


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


@on_a_gpu
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
    try:
        with warnings.catch_warnings(action="ignore"):  # that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def grouped(dtype: torch.dtype, counts: list[int]) -> tuple[list[Tensor], Tensor]:
    """Return rows, weights and biases of four experts, and the expert of each row."""
    torch.manual_seed(0)
    shapes = ([sum(counts), 64], [4, 32, 64], [4, 32])
    arguments = [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    return arguments, torch.arange(4).repeat_interleave(torch.tensor(counts))


def with_gradients(y: Tensor, arguments: list[Tensor]) -> list[Tensor]:
    return [value.float().cpu() for value in (y, *torch.autograd.grad(y.float().square().mean(), arguments))]


def test_one_kernel_for_all_experts() -> None:
    """It sums the gradients of many rows as precisely as it can; an expert may have none."""
    counts = [0, 4000, 8, 3000]
    arguments, expert = grouped(torch.bfloat16, counts)
    exact = [argument.detach().double().requires_grad_() for argument in arguments]
    expected = with_gradients(grouped_linear(*exact, expert, counts), exact)
    for one, other in zip(with_gradients(one_kernel(*arguments, expert), arguments), expected, strict=True):
        assert (one - other).norm() < 0.01 * other.norm()


@on_a_gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_grouped_linear_in_half_precision(autocast: bool) -> None:
    counts = [0, 40, 8, 100]
    values = []
    for device in ("cuda", "cpu"):  # one kernel, or a product for each group
        made, expert = grouped(torch.float32 if autocast else torch.bfloat16, counts)
        arguments = [value.detach().to(device).requires_grad_() for value in made]
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = grouped_linear(*arguments, expert.to(device), counts)
        values.append(with_gradients(y, arguments))
    for one, other in zip(*values, strict=True):
        assert torch.allclose(one, other, atol=0.1, rtol=0.05)
