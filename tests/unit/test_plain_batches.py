"""Loaders of one's own, whose batches are pairs of dicts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer
from torch.utils.data import DataLoader

from mtl import StackedDense, TopKGate
from mtl.checks import InputError
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, DataSpec, Numeric, TaskSpec
from mtl.types.batch import to_batch

TASKS = (TaskSpec("click", "binary"), TaskSpec("plan", "multiclass", 2), TaskSpec("minutes", "regression"))
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
LABELS = {"click": X[:, 0] > 0, "plan": (X[:, 1] > 0).int(), "minutes": X[:, 2]}


def trained(rows: Any, **options: Any) -> list[dict[str, float]]:
    torch.manual_seed(0)
    parts: Any = {"bottom": TabularBottom, "experts": partial(StackedDense, units=[4]), "heads": Heads}
    network = MMoE(DataSpec({"x": Numeric(4)}, TASKS), num_experts=2, gate=partial(TopKGate, k=1), **parts)
    module = MultiTaskModule(network, TASKS, partial(torch.optim.Adam, lr=0.01))
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = Trainer(max_epochs=2, accelerator="cpu", **quiet)
    trainer.fit(module, DataLoader(rows, 16, **options))
    return trainer.test(module, DataLoader(rows, 16, **options), verbose=False)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:You defined a `validation_step`",
    "ignore:The number of training batches",
)
def test_pairs_of_dicts_are_batches() -> None:
    """Labels of any type that fits the task; the same numbers as from batches of the program."""

    def as_batch(rows: Any) -> Batch:
        rows = [row for row, _ in rows]
        targets = {name: value[rows] for name, value in LABELS.items()}
        return Batch(
            {"x": X[rows]},
            {"click": targets["click"].float(), "plan": targets["plan"].long(), "minutes": targets["minutes"]},
        )

    pairs = [({"x": x}, {name: label[row] for name, label in LABELS.items()}) for row, x in enumerate(X)]
    [values] = trained(pairs)
    assert values["test/click/accuracy"] >= 0.5
    assert [values] == trained([(row, 0) for row in range(len(X))], collate_fn=as_batch)
    missing = to_batch(({"x": X}, {"plan": torch.tensor([0.0, torch.nan, 1.0])}), {task.name: task for task in TASKS})
    assert missing.targets["plan"].tolist() == [0, -100, 1]
    with pytest.raises(InputError, match=r"pairs of dicts, \(\{input: tensor\}, \{task: labels\}\), not a Tensor"):
        trained([1.0, 2.0])
    with pytest.raises(InputError, match=r"task 'click': binary labels are 0, 1 or NaN, not \[2"):
        trained([({"x": X[0]}, {"click": torch.tensor(label)}) for label in (1, 2)])
    with pytest.raises(InputError, match=r"labels of clik: .*; the tasks are click, plan, minutes"):
        trained([({"x": X[0]}, {"clik": X[0, 0]})])
