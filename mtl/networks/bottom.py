"""Turn the raw inputs of a batch into one vector per row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mtl.functional import at_least_float32
from mtl.types import Categorical, InputSpec, Numeric, require

EMBEDDING_RANGE = 0.05


class TabularBottom(nn.Module):
    """Concatenate an embedding per categorical input and the numeric inputs as they are.

    Embeddings have ``embedding_dim`` entries and start U(-0.05, 0.05). ``output_dim`` D is known after construction.
    """

    def __init__(self, inputs: Mapping[str, InputSpec], embedding_dim: int = 128) -> None:
        super().__init__()
        require(embedding_dim >= 1, f"network.bottom.embedding_dim={embedding_dim}: must be at least 1")
        self.embeddings = nn.ModuleList()  # not by name: a module cannot be called "type" or "a.b"
        self.categorical: list[str] = []
        self.numeric = [name for name, spec in inputs.items() if isinstance(spec, Numeric)]
        self.output_dim = 0
        for name, spec in inputs.items():
            if isinstance(spec, Categorical):
                table = nn.Embedding(spec.size, embedding_dim)
                nn.init.uniform_(table.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
                self.embeddings.append(table)
                self.categorical.append(name)
                self.output_dim += embedding_dim
            elif isinstance(spec, Numeric):
                self.output_dim += spec.width
            else:
                require(False, f"input {name!r} is {type(spec).__name__}: this bottom takes Categorical and Numeric")

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Map ``inputs[name]: [B]`` or ``[B, width]`` to ``[B, D]``."""
        parts = [table(inputs[name]) for name, table in zip(self.categorical, self.embeddings, strict=True)]
        parts += [at_least_float32(inputs[name]) for name in self.numeric]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
