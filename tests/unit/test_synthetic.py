"""The simulated data sets have the properties that the papers state."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from mtl.data_modules.synthetic_moe import UNITS, SyntheticMoEDataModule, draw_normal, relu_units
from mtl.data_modules.synthetic_pairs import SyntheticPairsDataModule, compute_response, draw_weights
from mtl.data_modules.synthetic_recovery import SyntheticRecoveryDataModule

from mtl.checks import InputError
from mtl.gates import FixedGate
from mtl.networks.frozen_experts import FrozenExpertsMoE
from mtl.types import Batch


def moe(**options: Any) -> SyntheticMoEDataModule:
    return SyntheticMoEDataModule(**{"batch_size": 32, "rows": (4000, 100, 100)} | options)


def test_related_tasks_correlate_more_than_unrelated_ones() -> None:
    spec, splits = moe(num_groups=2).load()
    y = torch.stack(list(splits["train"].targets.values()))
    correlation = torch.corrcoef(y)
    group = spec.ground_truth["task_group"]
    same = (group[:, None] == group) & ~torch.eye(len(group), dtype=torch.bool)
    assert correlation[same].mean() > correlation[group[:, None] != group].mean() + 0.2


def test_targets_are_mixtures_of_four_experts() -> None:
    """The 16 targets are mixtures of four functions, so they span at most four dimensions."""
    _, splits = moe().load()
    y = torch.stack(list(splits["train"].targets.values()), 1).double()
    values = torch.linalg.svdvals(y)
    assert values[3] > 1e-2 * values[0]
    assert values[4] < 1e-5 * values[0]


def test_targets_do_not_depend_on_the_order_of_sums() -> None:
    """Another processor adds in another order; the rounded targets are the same to the last bit."""
    _, splits = moe(tasks_per_group=3, seed=5).load()
    generator = torch.Generator().manual_seed(5)
    x, experts = draw_normal(4200, 10, generator=generator), draw_normal(4, UNITS, 10, generator=generator)
    common, own = (draw_normal(rows, 4, generator=generator) for rows in (1, 3))
    outputs = sum(x[:, [d]] * experts[:, :, d].flatten() for d in reversed(range(10))).relu().unflatten(1, (4, 4))
    y = outputs.sum(2) @ (0.8**0.5 * common + 0.2**0.5 * own).softmax(1).T
    found = torch.stack(list(splits["train"].targets.values()), 1)
    assert torch.equal(found, y[:4000].float())


def test_recovery_labels_come_from_the_true_experts() -> None:
    spec, splits = SyntheticRecoveryDataModule(batch_size=8, rows=(20_000, 50, 50)).load()
    weight, true = spec.ground_truth["expert_weight"], spec.ground_truth["true_experts"]
    assert weight.shape == (16, 4, 10)
    assert len(set(true.tolist())) == 4
    rows: Batch = splits["train"]
    outputs, label = relu_units(rows.inputs["x"], weight).sum(-1), rows.targets["label"]
    assert set(label.unique().tolist()) == {0.0, 1.0}

    def separation(experts: torch.Tensor) -> float:
        mixture = outputs[:, experts].mean(1)
        return float(mixture[label == 1].mean() - mixture[label == 0].mean()) / float(mixture.std())

    others = torch.tensor([e for e in range(16) if e not in true.tolist()])
    assert separation(true) > 1.3
    assert separation(true) > separation(others) + 0.3


def test_published_recovery_labels_are_the_sign_of_the_true_unit() -> None:
    data = SyntheticRecoveryDataModule(batch_size=8, rows=(2000, 50, 50), design="published")
    spec, splits = data.load()
    inputs, label = splits["train"].inputs, splits["train"].targets["label"]
    assert float(label.mean()) == pytest.approx(0.5, abs=0.03)
    network = FrozenExpertsMoE(
        spec, partial(FixedGate, weights=weights_of(spec.ground_truth["true_experts"])), true_unit=True
    )
    assert not any(parameter.requires_grad for parameter in network.parameters())
    logits = network(inputs).predictions["label"]
    assert ((logits > 0) == (label > 0)).float().mean() > 0.999  # but for ties with the median


def weights_of(true: torch.Tensor) -> list[list[float]]:
    return [torch.zeros(16).index_fill(0, true, 0.25).tolist()]


def test_a_true_unit_needs_data_that_has_one() -> None:
    spec, _ = SyntheticRecoveryDataModule(batch_size=8, rows=(50, 50, 50)).load()
    with pytest.raises(InputError, match=r"network\.true_unit=true needs data .* data\.design=published"):
        FrozenExpertsMoE(spec, partial(FixedGate, pattern="full"), true_unit=True)


# Pairs of tasks


def pairs(**options: Any) -> SyntheticPairsDataModule:
    data = SyntheticPairsDataModule(**{"batch_size": 50, "rows": (4000, 100, 200)} | options)
    data.setup()
    return data


def test_labels_by_hand() -> None:
    z = 0.7
    expected = z + math.sin(z) + math.sin(2 * z + 1) + math.sin(3 * z + 4)
    assert float(compute_response(torch.tensor([z]), 3)) == pytest.approx(expected, abs=1e-6)
    assert float(compute_response(torch.tensor([z]), 0)) == pytest.approx(z)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.5])
def test_labels_are_response_plus_noise(noise: float) -> None:
    data = pairs(noise=noise, rho=0.5)
    for index, (task, rows) in enumerate(data.tasks["train"].items()):
        residual = rows.targets[task] - compute_response(
            rows.inputs["x"] @ data.spec.ground_truth["task_weight"][index], 6
        )
        assert float(residual.std()) == pytest.approx(noise, rel=0.05, abs=1e-5)
        assert abs(float(residual.mean())) < 0.03 * noise + 1e-5


@pytest.mark.parametrize("rho", [-1.0, 0.0, 0.3, 1.0])
def test_dot_product_of_weights_is_rho_in_a_pair_and_else_zero(rho: float) -> None:
    weight = draw_weights(3, 20, rho, torch.Generator().manual_seed(0))
    pair = torch.tensor([[1, rho], [rho, 1]], dtype=torch.float64)
    torch.testing.assert_close(weight @ weight.T, torch.block_diag(pair, pair, pair), atol=1e-12, rtol=0)
