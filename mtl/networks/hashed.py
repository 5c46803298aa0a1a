"""Embedding tables with fewer rows than ids."""

from __future__ import annotations

from torch import Tensor, nn

PRIME = 2**31 - 1
HASHES = ((1_103_515_245, 12_345), (1_664_525, 1_013_904_223))  # (a, b): any numbers below the prime, a not 0


class HashedTable(nn.Module):
    """Sum two rows of ``table``, which two hash functions choose by the id (hash embeddings, Svenstrup et al. 2017).

        h(id) = 1 + ((a id + b) mod (2^31 - 1)) mod (rows - 1),    h(0) = 0

    Two ids share one row of two in most collisions, and hardly ever both. Id 0, padding or an unknown category, has a
    row of its own. The paper's weights of the two rows, two numbers for each id, are left out.
    """

    def __init__(self, table: nn.Embedding | nn.EmbeddingBag) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        """Return ``table`` at the hashed ``ids``, of any integer type."""
        ids = ids.long()
        buckets = len(self.table.weight) - 1
        first, second = ((1 + (a * (ids % PRIME) + b) % PRIME % buckets) * (ids != 0) for a, b in HASHES)
        summed: Tensor = self.table(first) + self.table(second)
        return summed
