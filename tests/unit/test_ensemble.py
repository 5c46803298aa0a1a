from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

import mtl
from mtl.checks import InputError
from mtl.experts.dense import StackedDense
from mtl.networks.baselines import SharedBottom
from mtl.networks.bottom import build_bottom
from mtl.networks.ensemble import Ensemble, mean_prediction
from mtl.networks.heads import Heads
from mtl.pipeline.run import run
from mtl.predictions import spread
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, DataSpec, Numeric, TaskSpec
from mtl.use.trained import load
from tests.integration.helpers import compose_small, resume_small
from tests.standins import bare_network

TASKS = [TaskSpec("click", "binary"), TaskSpec("size", "multiclass", 3), TaskSpec("price", "regression")]
SPEC = DataSpec({"x": Numeric(4)}, TASKS)


def member() -> SharedBottom:
    bottom = partial(build_bottom, embedding_dim=2)
    return SharedBottom(SPEC, bottom, partial(StackedDense, units=[5]), partial(Heads, units=[]))


def batch(rows: int = 9) -> Batch:
    targets = {
        "click": torch.tensor([0.0, 1.0, float("nan")]).repeat(rows // 3),
        "size": torch.tensor([0, 2, -100]).repeat(rows // 3),
        "price": torch.randn(rows, dtype=torch.float64),
    }
    return Batch({"x": torch.randn(rows, 4)}, targets)


@pytest.mark.parametrize("scale", [1.0, 300.0])  # logits at which a probability is 0 or 1 in float32
def test_mean_of_probabilities(scale: float) -> None:
    torch.manual_seed(0)
    logits, classes = scale * torch.randn(5, 7), scale * torch.randn(5, 7, 3)
    wide, many = logits.double().numpy(), classes.double().numpy()
    got = expit(mean_prediction(TASKS[0], logits).double().numpy())
    np.testing.assert_allclose(got, expit(wide).mean(0), atol=1e-6)
    got = softmax(mean_prediction(TASKS[1], classes).double().numpy(), -1)
    np.testing.assert_allclose(got, softmax(many, -1).mean(0), atol=1e-6)
    np.testing.assert_allclose(mean_prediction(TASKS[2], logits), wide.mean(0), rtol=1e-5, atol=1e-5)
    rates = mean_prediction(TaskSpec("n", "regression", loss="poisson"), logits / scale)
    np.testing.assert_allclose(rates.exp(), np.exp(wide / scale).mean(0), rtol=1e-5)


def test_each_member_has_a_loss_of_its_own() -> None:
    torch.manual_seed(0)
    members, rows = [member() for _ in range(3)], batch()
    alone = [MultiTaskModule(one, TASKS, torch.optim.SGD) for one in members]
    losses = [module.task_losses(module(rows.inputs), rows).global_losses for module in alone]
    assert not torch.allclose(losses[0], losses[1])
    together = MultiTaskModule(Ensemble(members), TASKS, torch.optim.SGD)
    terms = together.task_losses(together(rows.inputs), rows)
    torch.testing.assert_close(terms.global_losses, torch.stack(losses).mean(0))
    assert together.train_meter.compute()["loss"] == pytest.approx(float(terms.global_losses.sum()), rel=1e-6)


def test_spread_of_the_members() -> None:
    torch.manual_seed(0)
    tasks = {
        task.name: task for task in (*TASKS, TaskSpec("late", "regression", loss="quantile", quantiles=(0.1, 0.5)))
    }
    shapes = {"click": (4, 6), "size": (4, 6, 3), "price": (4, 6), "late": (4, 6, 2)}
    members = {name: torch.randn(shape) for name, shape in shapes.items()}
    found = spread(tasks, members)
    each = {name: value.double().numpy() for name, value in members.items()}
    classes = softmax(each["size"], -1)
    best = classes.mean(0).argmax(-1)
    expected = {
        "click": expit(each["click"]),
        "size": np.take_along_axis(classes, np.broadcast_to(best[None, :, None], (4, 6, 1)), 2)[..., 0],
        "price": each["price"],
        "late": np.sort(each["late"], -1)[..., 1],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values.std(0, ddof=1), rtol=1e-4, err_msg=name)


def test_predictions_of_an_ensemble_have_a_spread() -> None:
    frame = {"x": list(range(40)), "y": [i % 2 for i in range(40)]}
    model = mtl.fit(
        frame, {"y": "binary"}, ignore=[], max_epochs=1, options={"ensemble": 2, "blend": "none"}, progress=False
    )
    assert model.predict(frame).columns == ["y_class", "y_probability", "y_spread"]
    none = model.predict({"x": [], "y": []})
    assert none.schema == model.predict(frame).schema


def test_members_share_a_bottom_and_nothing_else() -> None:
    network = Ensemble([member(), member()])
    assert [type(part.bottom).__name__ for part in network.members] == ["Features", "Features"]
    weights = [dict(part.named_parameters()) for part in network.members]
    assert weights[0].keys() == weights[1].keys()
    assert not any(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] if "weight" in name)


def test_tasks_that_find_an_answer_have_no_ensemble() -> None:
    with pytest.raises(InputError, match="ensemble=2: there are no ensembles for tasks of kind span: answer"):
        Ensemble([bare_network(TaskSpec("answer", "span")) for _ in range(2)])


@pytest.mark.parametrize("words", [("network=shared_bottom",), ("gate=topk",), ("network=single_task",)])
def test_a_run_of_an_ensemble_is_loaded_as_it_was_tested(words: tuple[str, ...], tmp_path: Path) -> None:
    run(compose_small(tmp_path, "ensemble=3", "trainer.max_epochs=1", *words))
    network = load(tmp_path).network
    assert isinstance(network, Ensemble)
    assert len(network.members) == 3


def test_members_that_a_checkpoint_cannot_have_are_refused(tmp_path: Path) -> None:
    run(compose_small(tmp_path, "ensemble=2", "network=shared_bottom", "trainer.max_epochs=1"))
    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(InputError, match="ensemble is 2 in the checkpoint, 3 now"):
        run(resume_small(last, tmp_path / "more", "ensemble=3"))
    content = torch.load(last, weights_only=True)
    content["config"]["ensemble"] = 10**9
    torch.save(content, tmp_path / "huge.ckpt")
    with pytest.raises(InputError, match=r"huge.ckpt: ensemble.*1024"):
        load(tmp_path / "huge.ckpt")
