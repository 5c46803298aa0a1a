"""Hash gate (Hash layers: Roller et al. 2021): a fixed random table sends each id to one expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtl.gates.base import Gate, check_count
from mtl.kinds import Count, Seed
from mtl.types import Categorical, InputSpec, Routing, require


class HashGate(Gate):
    """Send every id of one categorical input to one expert, by a seeded table ``[T, ids]``; nothing is learnt.

    ``input_name`` names the input (default: the first categorical one); its number of ids comes from ``inputs``,
    the description of the data, or from ``table_size``. Each task has its own table, unless ``shared``. The numbers of
    ids per expert differ by at most one.
    """

    table: Tensor

    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int | None = None,
        inputs: Mapping[str, InputSpec] | None = None,
        input_name: str | None = None,
        table_size: Count | None = None,
        seed: Seed = 0,
        **common: Any,
    ) -> None:
        super().__init__(num_tasks, num_experts, input_dim, inputs, **common)
        sizes = {name: spec.size for name, spec in (inputs or {}).items() if isinstance(spec, Categorical)}
        if input_name is None and sizes:
            input_name = next(iter(sizes))
        if table_size is None:
            has = ", ".join(f"{name} ({type(spec).__name__})" for name, spec in (inputs or {}).items()) or "none"
            wanted = (
                "a categorical input" if input_name is None else f"the categorical input gate.input_name={input_name!r}"
            )
            require(input_name in sizes, f"the hash gate needs {wanted}; the inputs of this data are: {has}")
            table_size = sizes[str(input_name)]
        check_count("table_size", table_size)
        self.input_name = input_name
        generator = torch.Generator().manual_seed(seed)
        rows = [torch.randperm(table_size, generator=generator) % num_experts for _ in range(self.num_gates)]
        self.register_buffer("table", torch.stack(rows))

    def route(self, x: Tensor | None, inputs: Mapping[str, Tensor] | None, tasks: list[int] | None) -> Routing:
        if not inputs or (self.input_name is not None and self.input_name not in inputs):
            raise ValueError(f"the hash gate reads the raw input {self.input_name!r}; got {sorted(inputs or {})}")
        ids = inputs[self.input_name] if self.input_name is not None else next(iter(inputs.values()))
        table = self.table if tasks is None else self.table[tasks]
        experts = table[:, ids.long()].transpose(0, 1)  # [B, T]
        dtype = torch.get_default_dtype() if x is None else x.dtype
        return Routing(torch.nn.functional.one_hot(experts, self.num_experts).to(dtype))
