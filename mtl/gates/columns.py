"""Chosen columns as the input of a gate: scenario or domain gating (domain features of PEPNet: Chang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.checks import InputError, join_names, require, suggestion
from mtl.types import Bag, Categorical, InputSpec, Numeric


class Columns:
    """Turn the columns ``names`` of the raw inputs into one vector per row, ``[B, width]``.

    An id becomes one-hot, so that a gate has a row of weights for each scenario. A list becomes the fraction that each
    element has of it, and numbers stay as they are. ``inputs`` describes the raw inputs. Raises InputError for
    unknown names.
    """

    def __init__(self, names: Sequence[str], inputs: Mapping[str, InputSpec]) -> None:
        columns: dict[str, tuple[str, int, list[int] | None]] = {}  # of a column: input, width, which of its numbers
        for source, spec in inputs.items():
            if isinstance(spec, Categorical | Bag):
                columns[source] = (source, spec.size, None)
            elif isinstance(spec, Numeric):
                names_of_numbers = list(enumerate(spec.columns))
                numbers_of = {name: [i for i, other in names_of_numbers if other == name] for name in spec.columns}
                columns |= {name: (source, len(index), index) for name, index in numbers_of.items()}
                columns |= {} if numbers_of else {source: (source, spec.width, None)}
        unknown = [name for name in names if name not in columns]
        near = suggestion(unknown[0], columns) if unknown else ""
        require(
            not unknown,
            f"columns=[{', '.join(names)}]: this data has no {join_names(unknown)} for a gate to see{near or '.'} "
            f"It has {join_names(columns) or 'no such columns'}",
        )
        self.parts = [(source, index) for source, _, index in map(columns.__getitem__, names)]
        self.specs = {source: inputs[source] for source, _ in self.parts}
        self.width = sum(columns[name][1] for name in names)

    def __call__(self, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the columns of the raw ``inputs`` of a batch, ``[B, width]``."""
        missing = [name for name in self.specs if name not in inputs]
        if missing:
            raise InputError(f"the gate sees the raw input {missing[0]!r}; got {join_names(sorted(inputs)) or 'none'}")
        return torch.cat([_vector(inputs[name], self.specs[name], index, dtype) for name, index in self.parts], 1)


def _vector(values: Tensor, spec: InputSpec, index: list[int] | None, dtype: torch.dtype) -> Tensor:
    if isinstance(spec, Numeric):
        return (values if index is None else values[:, index]).to(dtype)
    if isinstance(spec, Bag):
        counts = F.one_hot(values.long(), spec.size).sum(1).to(dtype)
        counts = torch.cat([torch.zeros_like(counts[:, :1]), counts[:, 1:]], 1)  # id 0 is padding
        return counts / counts.sum(1, keepdim=True).clamp(min=1)
    assert isinstance(spec, Categorical)
    return F.one_hot(values.long(), spec.size).to(dtype)
