"""The simulated pairs of tasks have the properties that the papers state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mtl.data_modules.synthetic_pairs import SyntheticPairsDataModule, draw_weights, response
from torch import Tensor


def pairs(**options: Any) -> SyntheticPairsDataModule:
    data = SyntheticPairsDataModule(**{"batch_size": 50, "rows": (4000, 100, 200)} | options)
    data.setup()
    return data


def labels_at_one_input(rho: float) -> Tensor:
    """Return the labels ``[2, N]`` that the two tasks of a pair give to the same inputs."""
    weight = pairs(rho=rho, rows=(1, 1, 1)).spec.extras["task_weight"]
    x = torch.randn(50_000, 128, generator=torch.Generator().manual_seed(1))
    return torch.stack([response(x @ vector, 6) for vector in weight])


def test_spec_and_shapes() -> None:
    data = pairs(num_pairs=2, input_dim=16)
    assert data.spec.task_names == ["task_0_0", "task_0_1", "task_1_0", "task_1_1"]
    assert {task.kind for task in data.spec.tasks} == {"regression"}
    assert data.spec.extras["task_group"].tolist() == [0, 0, 1, 1]
    assert data.spec.inputs["x"].width == 16
    for split, size in (("train", 4000), ("val", 100), ("test", 200)):
        for task in data.spec.task_names:
            rows = data.tasks[split][task]
            assert rows.inputs["x"].shape == (size, 16)
            assert list(rows.targets) == [task]
            assert rows.targets[task].shape == (size,)
            assert rows.targets[task].dtype == torch.float32
    batch = next(iter(data.train_dataloader()))
    assert len(batch) == 50
    assert len(batch.targets) == 1


def test_inputs_are_normal_and_never_shared() -> None:
    data = pairs()
    x = torch.cat([rows.inputs["x"] for tasks in data.tasks.values() for rows in tasks.values()])
    assert len(x[:, :3].unique(dim=0)) == len(x) == 2 * 4300
    assert abs(float(x.mean())) < 0.01
    assert float(x.std()) == pytest.approx(1, abs=0.01)
    covariance = torch.cov(x.T)
    assert float((covariance - torch.eye(128)).abs().max()) < 0.08


def test_labels_by_hand() -> None:
    z = 0.7
    expected = z + math.sin(z) + math.sin(2 * z + 1) + math.sin(3 * z + 4)
    assert float(response(torch.tensor([z]), 3)) == pytest.approx(expected, abs=1e-6)
    assert float(response(torch.tensor([z]), 0)) == pytest.approx(z)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.5])
def test_labels_are_response_plus_noise(noise: float) -> None:
    data = pairs(noise=noise, rho=0.5)
    for index, (task, rows) in enumerate(data.tasks["train"].items()):
        residual = rows.targets[task] - response(rows.inputs["x"] @ data.spec.extras["task_weight"][index], 6)
        assert float(residual.std()) == pytest.approx(noise, rel=0.05, abs=1e-5)
        assert abs(float(residual.mean())) < 0.03 * noise + 1e-5


@pytest.mark.parametrize("rho", [-1.0, 0.0, 0.3, 1.0])
def test_dot_product_of_weights_is_rho_in_a_pair_and_else_zero(rho: float) -> None:
    weight = draw_weights(3, 20, rho, torch.Generator().manual_seed(0))
    pair = torch.tensor([[1, rho], [rho, 1]], dtype=torch.float64)
    torch.testing.assert_close(weight @ weight.T, torch.block_diag(pair, pair, pair), atol=1e-12, rtol=0)


def test_correlation_of_labels_grows_with_rho() -> None:
    def correlation(rho: float) -> float:
        return float(torch.corrcoef(labels_at_one_input(rho))[0, 1])

    assert correlation(1.0) == pytest.approx(1.0, abs=1e-6)
    assert correlation(0.0) == pytest.approx(0.0, abs=0.02)
    assert 0.1 < correlation(0.5) < correlation(0.9) < 0.99


def test_directions_recovered_from_rows() -> None:
    """For x ~ N(0, I), the mean of y x is proportional to w, so it reveals how the tasks of a pair are related."""
    data = pairs(num_pairs=2, rho=1.0, input_dim=8, rows=(40_000, 1, 1))
    found = torch.stack([rows.targets[task] @ rows.inputs["x"] for task, rows in data.tasks["train"].items()])
    unit = F.normalize(found)
    expected = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))
    torch.testing.assert_close(unit @ unit.T, expected, atol=0.1, rtol=0)
