"""Time each gate alone, forward and backward, for 1 to 128 tasks, against a softmax gate of the same shape.

python benchmarks/gate_cost.py [--rounds N]. Batches of 512, 256 features, 16 experts, K = 2.
"""

from __future__ import annotations

from collections.abc import Callable

from common import medians, options, take_turns, write

# isort: split
import torch
from step import GATES

from mtl.gates import Gate
from mtl.types import Categorical

ROWS, WIDTH, EXPERTS = 512, 256, 16


def caller(gate: Gate) -> Callable[[], object]:
    """Return a function that routes a random batch and takes the gradient."""

    def call() -> None:
        inputs = {"user": torch.randint(100, (ROWS,))}
        routing = gate(torch.randn(ROWS, WIDTH), inputs)
        loss = (routing.weights * torch.randn_like(routing.weights)).sum() + sum(routing.losses.values())
        if loss.requires_grad:
            gate.zero_grad()
            loss.backward()

    return call


def main() -> None:
    given = options(__doc__, rounds=10)
    rows: list[dict[str, object]] = [{"gate": name} for name in GATES]
    for tasks in (1, 2, 8, 32, 128):
        gates = {
            name: caller(make(num_tasks=tasks, num_experts=EXPERTS, input_dim=WIDTH, inputs={"user": Categorical(100)}))
            for name, make in GATES.items()
        }
        times = medians(take_turns(gates, given.rounds))
        for row in rows:
            name = str(row["gate"])
            row |= {f"{tasks} tasks, ms": times[name], f"of softmax, {tasks}": times[name] / times["softmax"]}
    write(given, "gate_cost", "Gates alone", rows)


if __name__ == "__main__":
    main()
