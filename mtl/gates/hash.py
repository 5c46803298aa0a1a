"""Hash gate (Hash layers: Roller et al. 2021): a fixed random table sends each id to one expert."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from mtl.checks import InputError, require
from mtl.gates.base import Gate
from mtl.nn.seeds import make_generator
from mtl.options import Name, Seed, validated
from mtl.types import Categorical, InputSpec, Routing


class HashGate(Gate):
    """Send every id of one categorical input to one expert, by a seeded table ``[T, ids]``; nothing is learnt.

    ``input_name`` names the input (default: the first categorical one); its number of ids comes from ``inputs``,
    the description of the data. Each task has its own table, unless ``shared``. ``assignment``:
    ``even``: the numbers of ids per expert differ by at most one; ``random``: each id's expert is drawn independently;
    ``balanced``: the ids, most frequent first, go to the expert with the fewest rows so far, which needs data that
    counts its ids (Roller et al. 2021, section 3.2).
    """

    reads_inputs = True
    table: Tensor

    @validated
    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        inputs: Mapping[str, InputSpec] | None = None,
        input_name: Name | None = None,
        seed: Seed = 0,
        assignment: Literal["even", "random", "balanced"] = "even",
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, inputs, **common)
        sizes = {name: spec.size for name, spec in (inputs or {}).items() if isinstance(spec, Categorical)}
        if input_name is None and sizes:
            input_name = next(iter(sizes))
        has = ", ".join(f"{name} ({type(spec).__name__})" for name, spec in (inputs or {}).items()) or "none"
        needed = "a categorical input" if input_name is None else f"the categorical input input_name={input_name!r}"
        require(input_name in sizes, f"the hash gate needs {needed}; the inputs of this data are: {has}")
        self.input_name, size = str(input_name), sizes[str(input_name)]
        generator = make_generator(seed)
        counts: Tensor | None = getattr((inputs or {}).get(str(input_name)), "counts", None)
        has_counts = assignment != "balanced" or counts is not None
        require(has_counts, f"assignment=balanced: the data module does not count the ids of {input_name!r}")
        rows = []
        for _ in range(self.num_gates):
            if assignment == "balanced" and counts is not None:
                rows.append(balanced_table(counts, num_experts, generator))
            elif assignment == "random":
                rows.append(torch.randint(num_experts, (size,), generator=generator, device="cpu"))
            else:
                rows.append(torch.randperm(size, generator=generator, device="cpu") % num_experts)
        self.register_buffer("table", torch.stack(rows).to(torch.get_default_device()))

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        if not inputs or self.input_name not in inputs:
            raise InputError(f"the hash gate reads the raw input {self.input_name!r}; got {sorted(inputs or {})}")
        table = self.table if tasks is None else self.table[tasks]
        experts = table[:, inputs[self.input_name].long()].transpose(0, 1)  # [B, T]
        dtype = torch.get_default_dtype() if x is None else x.dtype
        return Routing(torch.nn.functional.one_hot(experts, self.num_experts).to(dtype), exact_zeros=True)


def balanced_table(counts: Tensor, num_experts: int, generator: torch.Generator) -> Tensor:
    """Return the expert of each id, ``[ids]``: ids in order of falling ``counts [ids]`` go to the least loaded expert.

    ``generator`` breaks ties among equally frequent ids.
    """
    shuffled = torch.randperm(len(counts), generator=generator, device=counts.device)
    order = shuffled[counts[shuffled].argsort(descending=True, stable=True)]
    loads = [(0, 0, expert) for expert in range(num_experts)]  # rows, ids, expert: ids without rows are spread as well
    table = [0] * len(counts)
    for index, count in zip(order.tolist(), counts[order].tolist(), strict=True):
        rows, ids, expert = heapq.heappop(loads)
        table[index] = expert
        heapq.heappush(loads, (rows + int(count), ids + 1, expert))
    return torch.tensor(table, device="cpu")
