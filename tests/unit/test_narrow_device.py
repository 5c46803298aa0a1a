"""Devices without float64, such as Apple's GPUs: torch's device ``meta`` stands for one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtl.analysis.patterns import jaccard
from mtl.checks import InputError
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, FixedGate, HashGate
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.nn import functional
from mtl.training import evaluation, module
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, Categorical, DataSpec, Numeric, TaskSpec
from mtl.types import batch as batch_module
from tests.standins import bare_network

TASKS = [TaskSpec("click", "binary"), TaskSpec("stars", "regression", mean=3.0), TaskSpec("genre", "multiclass", 3)]
SPEC = DataSpec({"user": Categorical(5), "age": Numeric(2)}, TASKS)


@pytest.fixture(autouse=True)
def _meta_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (batch_module, functional, evaluation, module):
        monkeypatch.setattr(user, "has_float64", lambda device: device.type == "cpu")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which does not know meta


class NoFloat64(TorchDispatchMode):
    """Raise when an operation on ``meta`` makes a tensor of float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(found):
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                assert value.dtype != torch.float64, func
        return found


def batch() -> Batch:
    targets = {
        "click": torch.ones(4),
        "stars": torch.full((4,), 2.5, dtype=torch.float64),
        "genre": torch.arange(4) % 3,
    }
    return Batch({"user": torch.arange(4), "age": torch.randn(4, 2)}, targets)


def small() -> MultiTaskModule:
    network = MMoE(
        SPEC,
        num_experts=4,
        bottom=partial(TabularBottom, embedding_dim=4),
        experts=partial(StackedDense, units=[8]),
        gate=partial(CometGate, k=2),
        heads=partial(Heads, units=[4]),
    )
    made = MultiTaskModule(network, TASKS, partial(torch.optim.Adam, lr=0.1))
    made.log = lambda *args, **kwargs: None  # there is no trainer
    return made


def test_a_training_step_needs_no_float64() -> None:
    with NoFloat64():
        model, rows = small().to("meta"), batch().to("meta")
        assert rows.targets["stars"].dtype == torch.float32
        model.training_step(rows, 0)["loss"].backward()
        jaccard(torch.ones(2, 3, 4, dtype=torch.bool, device="meta"))
    assert model.train_meter.sums.dtype == torch.float32
    assert model.train_meter.sums.device.type == "meta"


def test_evaluation_stays_on_the_cpu() -> None:
    model = small().to("meta")
    assert {value.device.type for value in model.evaluation.state_dict().values()} <= {"cpu"}
    assert model.evaluation.meter.sums.device.type == "cpu"
    assert model.evaluation.meter.sums.dtype == torch.float64
    rows = batch()
    predictions = {"click": torch.zeros(4), "stars": torch.zeros(4), "genre": torch.zeros(4, 3)}
    model.evaluation.update(predictions, rows.targets)
    assert model.evaluation.compute()["stars/mse"] == pytest.approx(0.25)


@pytest.mark.parametrize(("std", "refused"), [(20.0, True), (1e6, False)])
def test_labels_that_need_float64_are_refused(std: float, refused: bool) -> None:
    made = MultiTaskModule(bare_network(), [TaskSpec("t", "regression", mean=1.7e9, std=std)], torch.optim.SGD)
    made.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("meta")))
    if not refused:
        return made.setup("fit")
    with pytest.raises(InputError, match=r"task 't': labels with mean 1700000000 .* need float64, which meta does not"):
        made.setup("fit")


def test_gates_that_draw_are_built_where_torch_says() -> None:
    with torch.device("meta"):
        built = [HashGate(2, 4, input_name="user", inputs=SPEC.inputs), FixedGate(2, 4, pattern="random", k=2)]
    assert all(buffer.is_meta for gate in built for buffer in gate.buffers())
