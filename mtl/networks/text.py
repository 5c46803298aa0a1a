"""Turn a text, or a pair of texts, into one vector per row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from mtl.networks.transformer import Transformer
from mtl.options import Dropout, validated
from mtl.types import DataSpec, InputSpec


class TextBottom(nn.Module):
    """The dense encoder of ``Transformer`` with random weights: a row becomes the state of its first token, ``[B, D]``.

    ``config``, ``dropout``: as of ``Transformer``.
    """

    @validated
    def __init__(
        self, inputs: Mapping[str, InputSpec], config: Mapping[str, Any] | None = None, dropout: Dropout | None = None
    ) -> None:
        super().__init__()
        spec, unused = DataSpec(inputs, []), cast(Any, nn.Identity)  # no expert, gate or head is built
        self.encoder = Transformer(spec, 1, unused, unused, unused, config=config, dropout=dropout, mixture_layers=[])
        self.output_dim: int = self.encoder.attention_config.hidden_size

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Map ``inputs["tokens"] [B, S]``, and ``"segments" [B, S]`` if there are two texts, to ``[B, D]``."""
        states, packing, _ = self.encoder.encode(inputs, [])
        return self.encoder.dropout(states[-1].index_select(0, packing.first))
