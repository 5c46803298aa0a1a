"""Turn the raw inputs of a batch into one vector per row."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from mtl.checks import InputError, require
from mtl.networks.attention import TargetAttention
from mtl.networks.bag import BagLayer, Pooling
from mtl.networks.numeric_embedding import PiecewiseLinearEmbedding, SoftClip
from mtl.nn.functional import at_least_float32
from mtl.options import Count, Dropout, validated
from mtl.types import Bag, Categorical, Image, InputSpec, Numeric, Tokens

EMBEDDING_RANGE = 0.05
EMBEDDING_STD = 0.3
NUMBER_DIM, MAX_EMBEDDED_NUMBERS = 8, 64  # of number_dim=auto
MAX_EMBEDDING_DIM = 16  # of an embedding whose width follows from the number of ids
HASH_PRIME = 2**31 - 1
HASH_FACTORS = ((1_103_515_245, 12_345), (1_664_525, 1_013_904_223))  # (a, b): any below the prime, a not 0
Buckets = Annotated[int, Field(ge=2, le=10**9)]  # rows of a hashed table


def build_bottom(inputs: Mapping[str, InputSpec], **options: Any) -> TabularBottom | ImageBottom:
    """Return the bottom that fits the inputs: one image, or categorical and numeric inputs, with ``options``."""
    if any(isinstance(spec, Image) for spec in inputs.values()):
        return ImageBottom(inputs)
    return TabularBottom(inputs, **options)


class ImageBottom(nn.Module):
    """Standardize one image per row to mean 0 and deviation 1; ``output_dim`` is its (channels, height, width)."""

    unit: Tensor

    @validated
    def __init__(self, inputs: Mapping[str, InputSpec]) -> None:
        super().__init__()
        [(self.name, spec), *more] = inputs.items()
        if not isinstance(spec, Image) or more:
            raise InputError(f"inputs {', '.join(inputs)}: this bottom takes one image and no other input")
        self.mean, self.std = spec.mean, spec.std
        self.register_buffer("unit", torch.ones(()), persistent=False)  # carries the network's precision
        self.output_dim = (spec.channels, spec.height, spec.width)

    def extra_repr(self) -> str:
        """Return name and shape of the image, as ``print`` shows them."""
        return f"input={self.name!r}, outputs={self.output_dim}"

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Map ``inputs[name]: [B, C, H, W]``, uint8 or values in [0, 1], to floats of the same shape."""
        image = inputs[self.name]
        if image.dtype == torch.uint8:
            wide = image.to(at_least_float32(self.unit).dtype)
            return wide.mul_(1 / (255 * self.std)).sub_(self.mean / self.std).to(self.unit.dtype)
        return ((at_least_float32(image) - self.mean) / self.std).to(self.unit.dtype)


class TabularBottom(nn.Module):
    """Concatenate an embedding of each categorical input and of each list with the numeric inputs.

    Embeddings have ``embedding_dim`` entries and start U(-0.05, 0.05). With None, each input's number of ids decides,
    see ``default_embedding_dim``, and they start N(0, 0.3^2). That of a list is the mean over its elements, zeros for
    an empty one; ``list_pooling``, ``list_dropout`` and ``list_dim``, in place of ``embedding_dim``, change this, see
    ``BagLayer``. A list with a target shares the target's embeddings, and ``TargetAttention`` of ``attention_units``
    sums them, whatever these three are. An input with more than ``hash_buckets`` ids has a table of so many rows, see
    ``HashEmbedding``. If it has more only since a later run, earlier ids keep their rows, and the ids beyond the table
    have the mean of two hashed rows.

    Numbers are unchanged, except that those whose edges the data module has learnt are ``soft_clip``; with
    ``number_dim``, they get a ``PiecewiseLinearEmbedding`` of so many entries too; "auto": of ``NUMBER_DIM``, unless
    there are more than ``MAX_EMBEDDED_NUMBERS``. ``output_dim`` D is known after construction.
    """

    @validated
    def __init__(
        self,
        inputs: Mapping[str, InputSpec],
        embedding_dim: Count | None = 128,
        attention_units: Sequence[Count] = (36,),
        hash_buckets: Buckets | None = None,
        number_dim: Count | Literal["auto"] | None = None,
        list_pooling: Pooling = "mean",
        list_dim: Count | None = None,
        list_dropout: Dropout = 0.0,
    ) -> None:
        super().__init__()
        if number_dim == "auto":
            width = sum(spec.width for spec in inputs.values() if isinstance(spec, Numeric))
            number_dim = NUMBER_DIM if width <= MAX_EMBEDDED_NUMBERS else None
        self.embeddings = nn.ModuleList()  # a ModuleDict refuses names such as "type" and "a.b"
        self.categorical: list[str] = []  # and lists, in the order of their embeddings
        self.overfull: set[str] = set()  # inputs with ids beyond their table, which later runs have added
        self.numeric = [name for name, spec in inputs.items() if isinstance(spec, Numeric)]
        self.output_dim = 0
        attended = {name: spec for name, spec in inputs.items() if isinstance(spec, Bag) and spec.target is not None}
        self.targets = {name: str(spec.target) for name, spec in attended.items()}  # of each list that has one
        sizes = {str(spec.target): spec.size for spec in attended.values()}
        dims = {
            name: embedding_dim or default_embedding_dim(sizes.get(name, spec.size) - spec.added)
            for name, spec in inputs.items()
            if isinstance(spec, Categorical | Bag)
        }
        dims |= {name: dims[target] for name, target in self.targets.items()}
        self.pooled = [name for name, spec in inputs.items() if isinstance(spec, Bag) and spec.target is None]
        of_lists = list_pooling != "mean" or list_dim is not None or list_dropout > 0
        no_list = "no input is a list without a target, see data.columns"
        require(bool(self.pooled) or not of_lists, f"bottom.list_pooling, list_dim, list_dropout: {no_list}")
        dims |= dict.fromkeys(self.pooled, list_dim) if list_dim is not None else {}
        self.bags = nn.ModuleList(BagLayer(dims[name], list_pooling, list_dropout) for name in self.pooled)
        self.attention = nn.ModuleList(TargetAttention(dims[name], attention_units) for name in attended)
        self.numbers = nn.ModuleList()  # of the numeric inputs, in order
        for name, spec in inputs.items():
            if name in attended:
                self.output_dim += dims[name]
            elif isinstance(spec, Categorical | Bag):
                size = sizes.get(name, spec.size)  # a target's table begins with the padding of lists
                rows = size if hash_buckets is None else min(size, hash_buckets)
                table: nn.Embedding | nn.EmbeddingBag = nn.Embedding(rows, dims[name])
                if isinstance(spec, Bag):
                    mode = "mean" if list_pooling == "mean" else "sum"
                    table = nn.EmbeddingBag(rows, dims[name], mode=mode, padding_idx=0)
                if embedding_dim is None:
                    nn.init.normal_(table.weight, std=EMBEDDING_STD)
                else:
                    nn.init.uniform_(table.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
                hashed = size - spec.added > rows
                self.embeddings.append(HashEmbedding(table) if hashed else table)
                self.categorical.append(name)
                if rows < size and not hashed:
                    self.overfull.add(name)
                self.output_dim += dims[name]
            elif isinstance(spec, Numeric):
                if not any(spec.edges):
                    self.numbers.append(nn.Identity())
                    self.output_dim += spec.width
                elif number_dim is None:
                    self.numbers.append(SoftClip(spec.edges))
                    self.output_dim += spec.width
                else:
                    embedding = PiecewiseLinearEmbedding(spec.edges, number_dim)
                    self.numbers.append(embedding)
                    self.output_dim += embedding.output_dim
            else:
                texts = "; texts need network=transformer or bottom=text" if isinstance(spec, Tokens) else ""
                kind = type(spec).__name__
                accepted = f"this network takes Categorical, Bag and Numeric inputs{texts}"
                raise InputError(f"input {name!r} is {kind}: {accepted}")

    def extra_repr(self) -> str:
        """Return the number of inputs of each kind and the width of the result, as ``print`` shows them."""
        embedded = len(self.categorical) + len(self.targets)
        return f"embedded={embedded}, numeric={len(self.numeric)}, outputs={self.output_dim}"

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Map ``inputs[name]: [B]``, ``[B, length]`` or ``[B, width]`` to ``[B, D]``."""
        tables: dict[str, Any] = dict(zip(self.categorical, self.embeddings, strict=True))

        def embed(name: str, ids: Tensor) -> Tensor:
            table = tables[name]
            if name not in self.overfull:
                return table(ids)
            first, second = hashed_rows(ids, len(table.weight), len(table.weight))
            return (table(first) + table(second)) / 2  # the same row twice for ids within the table

        bags, targets = dict(zip(self.pooled, self.bags, strict=True)), {*self.targets.values()}
        embedded = {
            name: bags[name](ids, partial(embed, name)) if name in bags else embed(name, ids + (name in targets))
            for name in tables
            for ids in [inputs[name]]
        }
        parts = [*embedded.values()]
        for (name, target), attention in zip(self.targets.items(), self.attention, strict=True):
            parts.append(attention(embed(target, inputs[name]), embedded[target], inputs[name] != 0))
        for name, embedding in zip(self.numeric, self.numbers, strict=True):
            parts.append(embedding(at_least_float32(inputs[name])))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def default_embedding_dim(size: int) -> int:
    """Return a width for the embeddings of ``size`` ids: 2 for two ids, 16 for 58 or more.

    1.6 size^0.56, a rule of thumb of the fastai library, with an upper bound.
    """
    return min(MAX_EMBEDDING_DIM, round(1.6 * size**0.56))


class HashEmbedding(nn.Module):
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
        first, second = hashed_rows(ids, len(self.table.weight))
        summed: Tensor = self.table(first) + self.table(second)
        return summed


def hashed_rows(ids: Tensor, rows: int, unhashed: int = 1) -> list[Tensor]:
    """Return the two of ``rows`` rows of a table that hash functions choose for ``ids``, int64 of their shape.

    The ids below ``unhashed`` have a row of their own.
    """
    ids = ids.long()
    p, rest = HASH_PRIME, rows - 1
    return [torch.where(ids < unhashed, ids, 1 + (a * (ids % p) + b) % p % rest) for a, b in HASH_FACTORS]


build_bottom.__signature__ = inspect.signature(TabularBottom)  # type: ignore[attr-defined]  # the options it accepts
