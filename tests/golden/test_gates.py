"""Reproduce weights, selectors, regularisers and gradients of the papers' reference implementations.

Every file in ``vectors/`` is a case; set MTL_GOLDEN_DIR to try those of another folder. ``vectors/README.md`` says what
they hold and how they were computed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mtl.gates import CometGate, DSelectKGate, Gate, TopKGate
from mtl.gates.permuted import Permutation, matrix_entropy, permute, sinkhorn
from mtl.nn.functional import smooth_step
from mtl.training.schedules import linear, log_linear
from mtl.types import Routing

FOLDER = Path(os.environ.get("MTL_GOLDEN_DIR", Path(__file__).parent / "vectors"))
FILES = sorted(FOLDER.glob("*.npz"))
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def test_golden_vectors_exist() -> None:
    """A folder without files would leave nothing to compare, and every other test would pass."""
    assert len(FILES) > 0, f"no golden vectors in {FOLDER}"


def cases(pattern: str) -> pytest.MarkDecorator:
    chosen = [path for path in FILES if re.fullmatch(pattern, path.stem)]
    return pytest.mark.parametrize("path", chosen, ids=[path.stem for path in chosen])


class Case:
    """A golden file as tensors of one precision."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            self.arrays = {name: arrays[name] for name in arrays.files}
        self.dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        return torch.as_tensor(self.arrays[name]).to(self.dtype)

    def scalar(self, name: str) -> float:
        return float(self.arrays[name])

    def close(self, actual: Tensor, name: str, scale: float = 1.0) -> None:
        expected = self[name] * scale
        tolerance = TOLERANCE[self.dtype]
        size = max(1.0, float(expected.abs().max()))  # the reachability gradients reach 1e5
        torch.testing.assert_close(
            actual.reshape(expected.shape),
            expected,
            atol=tolerance * size,
            rtol=tolerance,
            msg=lambda m: f"{name}: {m}",
        )


def load(gate: Gate, case: Case, names: dict[str, str]) -> Gate:
    """Give ``gate`` (of one task) the case's parameters: ours by name -> theirs."""
    gate = gate.to(case.dtype)
    state = {ours: case[theirs].reshape(gate.get_parameter(ours).shape) for ours, theirs in names.items()}
    gate.load_state_dict(state)
    return gate


def check_gradients(
    gate: Gate, scalar: Tensor, case: Case, names: dict[str, str], suffix: str = "", scale: float = 1.0
) -> None:
    """Compare d(scalar)/d(parameter) with ``grad_<theirs><suffix>``."""
    gate.zero_grad()
    scalar.backward(retain_graph=True)
    for ours, theirs in names.items():
        if f"grad_{theirs}{suffix}" in case.arrays:
            case.close(gate.get_parameter(ours).grad, f"grad_{theirs}{suffix}", scale)


@DTYPES
@cases(r"comet_.*")
def test_comet(path: Path, dtype: torch.dtype) -> None:
    case = Case(path, dtype)
    n, k = int(case.scalar("n")), int(case.scalar("k"))
    names = {f"{part}_{kind}": f"{part}_{kind}" for part in ("split", "leaf") for kind in ("weight", "bias")}
    gate = load(CometGate(1, n, case["x"].shape[1], k=k, gamma=case.scalar("gamma"), entropy_weight=1.0), case, names)
    x = case["x"].requires_grad_()
    routing: Routing = gate(x)
    case.close(routing.weights, "g")
    case.close(routing.selectors, "v")
    case.close(routing.losses["entropy"], "entropy")
    objective = (routing.weights[:, 0] * case["c"]).sum()
    check_gradients(gate, objective, case, names)
    case.close(x.grad, "grad_x")
    check_gradients(gate, routing.losses["entropy"], case, names, "_entropy")


@DTYPES
@cases(r"dselect_n.*|dselect_static.*")
def test_dselect_k(path: Path, dtype: torch.dtype) -> None:
    case = Case(path, dtype)
    static = "static" in path.stem
    n, k = int(case.scalar("n")), int(case.scalar("k"))
    if static:
        names = {"selector_bias": "z", "mix_bias": "w"}
        x, width = None, None
    else:
        names = {
            f"{o}_{b}": f"{t}_{kind}"
            for o, t in (("selector", "z"), ("mix", "w"))
            for b, kind in (("weight", "kernel"), ("bias", "bias"))
        }
        x, width = case["x"].requires_grad_(), case["x"].shape[1]
    gate = load(DSelectKGate(1, n, width, k=k, gamma=case.scalar("gamma"), entropy_weight=1.0), case, names)
    routing: Routing = gate(x)
    case.close(routing.weights, "expert_weights")
    case.close(routing.selectors, "selector_outputs")
    case.close(routing.losses["entropy"], "entropy")
    objective = (routing.weights.squeeze(-2) * case["c"]).sum()
    check_gradients(gate, objective, case, names)
    if x is not None:
        case.close(x.grad, "grad_x")
    check_gradients(gate, routing.losses["entropy"], case, names, "_entropy")
    assert ("reachability" in routing.losses) == ("reach_penalty" in case.arrays)
    if "reach_penalty" in case.arrays:  # the reference sums over the batch, we average
        rows = 1 if x is None else len(x)
        case.close(routing.losses["reachability"], "reach_penalty", 1 / rows)
        check_gradients(gate, routing.losses["reachability"], case, names, "_reach", 1 / rows)


@DTYPES
@cases(r"topk_.*")
def test_topk(path: Path, dtype: torch.dtype) -> None:
    case = Case(path, dtype)
    names = {"weight": "weight", "bias": "bias"}
    k = case["indices"].shape[1]
    gate = load(TopKGate(1, case["weight"].shape[0], case["x"].shape[1], k=k), case, names)
    x = case["x"].requires_grad_()
    weights = gate(x).weights
    case.close(weights, "weights")
    assert torch.equal(weights[:, 0].topk(k, -1).indices.sort(-1).values, case["indices"].long().sort(-1).values)
    check_gradients(gate, (weights[:, 0] * case["c"]).sum(), case, names)
    case.close(x.grad, "grad_x")


@DTYPES
@cases(r"smooth_step_.*")
def test_smooth_step(path: Path, dtype: torch.dtype) -> None:
    case = Case(path, dtype)
    x = case["x"].requires_grad_()
    y = smooth_step(x, case.scalar("gamma"))
    case.close(y, "y")
    y.sum().backward()
    expected = case["dy_dx"]
    # a slope of 1.5 / gamma: its error is relative to that
    torch.testing.assert_close(x.grad, expected, atol=TOLERANCE[dtype] * 1.5 / case.scalar("gamma"), rtol=1e-5)
    if dtype == torch.float64:
        assert (x.grad[expected == 0] == 0).all()


@cases(r"sinkhorn_.*")
def test_sinkhorn(path: Path) -> None:
    case = Case(path, torch.float64)
    logits = case["U"]
    for number, (rounds, tau) in enumerate(zip([20, 50, 150, 20, 20], [1e-3, 1e-4, 1e-7, 1.0, 0.1], strict=True)):
        permutation = Permutation(len(logits), tau=tau, rounds=rounds, entropy_weight=1.0).double()
        with torch.no_grad():
            permutation.logits.copy_(logits[None])
        soft = permutation.soft()
        close(soft[0], case["S"][number])
        (soft[0] * case["c"]).sum().backward()
        expected = case["grad_U"][number]
        torch.testing.assert_close(
            permutation.logits.grad[0], expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max())
        )
        close(matrix_entropy(soft.detach()), case["entropy"][number])

        weights = case["g"][:, None]  # [B, T=1, E]
        routing = permutation.train()(Routing(weights))
        close(routing.weights[:, 0], case["g_soft"][number])
        close(routing.losses["permutation"].detach(), case["entropy"][number])
        hard = permutation.matrix()[0]
        gained = (case["S"][number] * hard).sum()
        close(gained, (case["S"][number] * case["hard"][number]).sum())  # as good an assignment,
        if case["hard_gap"][number] > 1e-6:  # and the same one where there is but one
            close(hard, case["hard"][number])
            close(permutation.eval()(Routing(weights)).weights[:, 0], case["g_hard"][number])


@cases(r"sinkhorn_.*")
def test_sinkhorn_float32(path: Path) -> None:
    case = Case(path, torch.float32)
    for number, (rounds, tau) in enumerate(zip([20, 20], [1.0, 0.1], strict=True), start=3):
        close(sinkhorn(case["U"], tau, rounds), case["S"][number], 1e-5)


@cases(r"schedule")
def test_schedule(path: Path) -> None:
    case = Case(path, torch.float64)
    for number, fraction in enumerate(case["fraction"].tolist()):
        close(log_linear(fraction, 1e-3, 1e-7), case["tau"][number], 1e-15)
        rounds = linear(fraction, 20, 150)
        close(rounds, case["R_real"][number])
        assert int(rounds) == int(case["R"][number])


def close(actual: Tensor | float, expected: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(torch.as_tensor(actual, dtype=expected.dtype), expected, rtol=tolerance, atol=tolerance)


@cases(r"topk_.*")
def test_permuted_topk(path: Path) -> None:
    """A soft matrix around a gate: weights times the matrix, divided by the sum."""
    case = Case(path, torch.float64)
    if "perm" not in case.arrays:
        pytest.skip("no permuted weights in this file")
    n, k = len(case["weight"]), case["indices"].shape[1]
    gate = load(TopKGate(1, n, case["x"].shape[1], k=k), case, {"weight": "weight", "bias": "bias"})
    close(permute(gate(case["x"]).weights, case["perm"].mean(0)[None], normalize=True)[:, 0], case["weights_perm"])
