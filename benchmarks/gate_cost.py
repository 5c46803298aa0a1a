"""Time each gate alone, forward and backward, for 1 to 128 tasks, relative to a softmax gate.

python benchmarks/gate_cost.py [--rounds N]. Batches of 512, 256 features, 16 experts, K = 2; gradients of parameters
and features. Per task, a softmax gate has 16 logits, DSelect-k 10 and COMET 62; therefore a softmax gate over 62
experts is timed as well. The last column is the time for two tasks as a share of a dense training step of the MovieLens
network with this gate.
"""

from __future__ import annotations

from collections.abc import Callable

from common import medians, options, take_turns, write

# isort: split
import torch
from step import GATES, ROWS, ours, training

from mtl.gates import Gate, SoftmaxGate
from mtl.types import Categorical

WIDTH, EXPERTS, LOGITS_OF_COMET = 256, 16, 62
WIDER = "softmax over 62 experts"


def caller(gate: Gate) -> Callable[[], object]:
    """Return a function that routes a batch and computes the gradients."""
    x, inputs = torch.randn(ROWS, WIDTH, requires_grad=True), {"user": torch.randint(100, (ROWS,))}
    direction = torch.randn_like(gate(x, inputs).weights)

    def call() -> None:
        routing = gate(x, inputs)
        loss = (routing.weights * direction).sum() + sum(routing.losses.values())
        if loss.requires_grad:
            gate.zero_grad()
            x.grad = None
            loss.backward()

    return call


def main() -> None:
    given = options(__doc__, rounds=10)
    names = [*GATES, WIDER]
    rows: list[dict[str, object]] = [{"gate": name} for name in names]
    for tasks in (1, 2, 8, 32, 128):
        gates = {}
        for name in names:
            make, experts = GATES.get(name, SoftmaxGate), EXPERTS if name in GATES else LOGITS_OF_COMET
            gate = make(num_tasks=tasks, num_experts=experts, input_dim=WIDTH, inputs={"user": Categorical(100)})
            gates[name] = caller(gate)
        times = medians(take_turns(gates, given.rounds))
        for row in rows:
            name = str(row["gate"])
            row |= {f"{tasks} tasks, ms": times[name], f"of softmax, {tasks}": times[name] / times["softmax"]}
    steps = medians(take_turns({n: training(ours(gate)) for n, gate in GATES.items()}, given.rounds))
    for row in rows[: len(GATES)]:
        alone = row["2 tasks, ms"]
        assert isinstance(alone, float)
        row["of a step"] = f"{alone / steps[str(row['gate'])]:.1%}"
    write(given, "gate_cost", "Gates alone", rows)


if __name__ == "__main__":
    main()
