"""The list of gates that the conformance and property tests run on: a new gate is one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtl.gates import (
    CometGate,
    CosineGate,
    DSelectKGate,
    FixedGate,
    Gate,
    GumbelMatrixGate,
    GumbelSoftmaxGate,
    HashGate,
    ReMoEGate,
    SoftmaxGate,
    SoftmaxSelectorGate,
    TaskTop1Gate,
    TopKGate,
)
from mtl.gates.joined import JoinedGates
from mtl.types import Categorical, Routing

IDS = 50  # of the raw input that the hash gate reads


@dataclass(frozen=True)
class GateCase:
    """A gate, how to make it, and what may be expected of it."""

    name: str
    make: Callable[..., Gate]
    k: int | None = None  # at most so many nonzeros once its selectors are binary; None: no such bound
    sums_to_one: bool = True  # else to at most 1
    bounded: bool = True  # the weights of a sample sum to at most 1
    learns: bool = True
    static: bool = True  # has a version that does not look at the example
    looks: bool = True  # has a version that does
    stacked: bool = True  # the tasks are the first dimension of every parameter

    def build(self, num_tasks: int, num_experts: int, input_dim: int | None) -> Gate:
        options = {} if self.k is None or self.name.startswith(("task", "hash")) else {"k": min(self.k, num_experts)}
        return self.make(
            num_tasks=num_tasks,
            num_experts=num_experts,
            input_dim=input_dim,
            inputs={"id": Categorical(IDS)},
            **options,
        )

    def whole(self, num_experts: int) -> bool:
        """Say whether the weights sum to exactly 1: DSelect-k's codes reach all experts at powers of two only."""
        power = num_experts & (num_experts - 1) == 0
        return self.sums_to_one and (power or self.name != "dselect_k")


def separate_comet(num_tasks: int, k: int = 1, **sizes: Any) -> Gate:
    return JoinedGates({f"task {task}": CometGate(1, k=k, entropy_weight=0.1, **sizes) for task in range(num_tasks)})


CASES = [
    GateCase("softmax", SoftmaxGate),
    GateCase("softmax_shared", partial(SoftmaxGate, shared=True)),
    GateCase("topk", TopKGate, k=2),
    GateCase("topk_before", partial(TopKGate, normalize="before"), k=2, sums_to_one=False),
    GateCase("topk_noisy", partial(TopKGate, noisy=True, importance_weight=0.1, balance_weight=0.1, z_weight=0.1), k=2),
    GateCase("topk_load", partial(TopKGate, noisy=True, load_weight=0.1), k=2),
    GateCase("topk_sigmoid", partial(TopKGate, scores="sigmoid", balance_weight=0.1), k=2),
    GateCase("topk_bias", partial(TopKGate, scores="sigmoid", bias_rate=0.1), k=2, static=False),
    GateCase("cosine", partial(CosineGate, balance_weight=0.1), k=2, sums_to_one=False, static=False),
    GateCase("remoe", partial(ReMoEGate, k=1, initial_l1=0.1), sums_to_one=False, bounded=False, static=False),
    GateCase("hash", HashGate, k=1, learns=False, static=False),
    GateCase("hash_shared", partial(HashGate, shared=True), k=1, learns=False, static=False),
    GateCase("dselect_k", partial(DSelectKGate, entropy_weight=0.1), k=2),
    GateCase("softmax_selector", partial(SoftmaxSelectorGate, entropy_weight=0.1), k=2),
    GateCase("comet", partial(CometGate, entropy_weight=0.1), k=2),
    GateCase("comet_shared", partial(CometGate, shared=True), k=2),
    GateCase("gumbel_softmax", partial(GumbelSoftmaxGate, sparsity_weight=0.1), sums_to_one=False),
    GateCase("gumbel_matrix", partial(GumbelMatrixGate, budget=0.3, budget_weight=0.1), sums_to_one=False, looks=False),
    GateCase("task_top1", partial(TaskTop1Gate, balance_weight=0.1), k=1, sums_to_one=False),
    GateCase("task_top1_shared", partial(TaskTop1Gate, shared=True), k=1, sums_to_one=False),
    GateCase("task_top1_published", partial(TaskTop1Gate, bias=False, initial_std=0.001), 1, False, static=False),
    GateCase("task_top1_keep_scale", partial(TaskTop1Gate, keep_scale=True), k=1),
    GateCase("separate", separate_comet, k=2, stacked=False),
    GateCase("fixed", partial(FixedGate, pattern="shared_bottom"), learns=False, looks=False),
]


def route(gate: Gate, x: Tensor | None, rows: int = 7, tasks: list[int] | None = None) -> Routing:
    """Route ``rows`` examples, with raw inputs for the gates that read them."""
    routing: Routing = gate(x, {"id": torch.arange(rows) % IDS}, tasks)
    return routing


def harden(gate: Gate, factor: float = 1e9) -> None:
    """Scale what selects, so that every selector is binary."""
    with torch.no_grad():
        for name, parameter in gate.named_parameters():
            if name.rpartition(".")[2].startswith(("selector_", "split_")):
                parameter.mul_(factor)
