"""Decision trees as tensors: whatever library grew them, torch alone predicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.nn.functional import float64_if_supported

ROWS, TREES = 256, 1024  # that are computed at once; more rows than fit into the cache take longer


@dataclass(frozen=True)
class Condition:
    """When a row takes the right branch: if a number is above ``threshold``, or if ``right`` says so for its id.

    ``column``: of the numbers, or of the ids if ``right`` is not empty. ``right``: for the ids from ``first`` on.
    ``other``: for a number that is NaN, and for all other ids.
    """

    column: int
    other: bool
    threshold: float = 0.0
    first: int = 0
    right: bytes = b""


class Split(NamedTuple):
    """A node of a tree; a leaf is its value."""

    condition: Condition
    left: Tree
    right: Tree


Tree = Split | float


@lru_cache(10_000)  # trees repeat the bounds of a few bins
def number_condition(column: int, threshold: float, other: bool) -> Condition:
    """Return the condition x > ``threshold`` of a float32 number x, with a threshold that float32 can hold."""
    largest = float(np.finfo(np.float32).max)
    rounded = np.float32(min(threshold, largest))
    rounded = np.nextafter(rounded, np.float32(-np.inf)) if float(rounded) > threshold else rounded
    return Condition(column, other, threshold=float(rounded))


def forest_state(trees: Iterable[tuple[int, Tree]], bias: Sequence[float]) -> dict[str, Tensor]:
    """Return the tensors of a ``Forest`` of trees, each with the index of its output; ``bias``: of each output."""
    root, depth, output = list[int](), list[int](), list[int]()
    nodes = list[tuple[Condition | None, int, float]]()  # condition, left child and value
    for index, levels in sorted(((i, _levels(tree)) for i, tree in trees), key=lambda pair: len(pair[1])):
        root.append(len(nodes))
        depth.append(len(levels) - 1)  # deep trees come last, so that they are computed together
        output.append(index)
        for level in levels:
            child = len(nodes) + len(level)
            for node in level:
                if isinstance(node, Split):
                    nodes.append((node.condition, child, 0.0))
                    child += 2
                else:
                    nodes.append((None, len(nodes), node))
    # In a leaf, condition 0, which is never true, keeps the row there; then come those of numbers, then those of ids
    conditions = sorted(dict.fromkeys(condition for condition, *_ in nodes if condition), key=lambda c: bool(c.right))
    index_by_condition = {condition: index for index, condition in enumerate([None, *conditions])}
    of_numbers, of_ids = ([c for c in conditions if bool(c.right) == has_ids] for has_ids in (False, True))
    integers = {
        "root": root,
        "depth": depth,
        "output": output,
        "condition": [index_by_condition[condition] for condition, _, _ in nodes],
        "left": [left for _, left, _ in nodes],
        "number_column": [c.column for c in of_numbers],
        "id_column": [c.column for c in of_ids],
        "first": [c.first for c in of_ids],
        "size": [len(c.right) for c in of_ids],
        "start": np.cumsum([0, *(1 + len(c.right) for c in of_ids)])[:-1],
    }
    bits = {"nan": [c.other for c in of_numbers], "right": [bit for c in of_ids for bit in (c.other, *c.right)]}
    values = [value for _, _, value in nodes]
    floats = {"threshold": [c.threshold for c in of_numbers], "value": values, "bias": bias}
    kinds = ((integers, torch.int32), (bits, torch.bool), (floats, torch.float32))
    return {name: torch.as_tensor(v, dtype=dtype) for part, dtype in kinds for name, v in part.items()}


def _levels(tree: Tree) -> list[list[Tree]]:
    """Return the nodes of a tree by depth, the right child of a node after the left one."""
    levels = [[tree]]
    while below := [child for node in levels[-1] if isinstance(node, Split) for child in (node.left, node.right)]:
        levels.append(below)
    return levels


class Forest(nn.Module):
    """The sums of the trees of ``forest_state``, for each of O outputs.

    Each of N nodes has a condition, a left child, and after it a right one; a leaf is its own left child.
    """

    root: Tensor  # [T] node of each tree, those of the deepest tree last
    depth: Tensor  # [T]
    output: Tensor  # [T] index of the output that a tree is for
    condition: Tensor  # [N] index among all conditions, from 1; 0 in a leaf
    left: Tensor  # [N]
    value: Tensor  # [N] of a leaf
    bias: Tensor  # [O]
    number_column: Tensor  # [conditions of numbers]
    threshold: Tensor
    nan: Tensor
    id_column: Tensor  # [conditions of ids]
    first: Tensor
    size: Tensor  # number of ids from the first one on
    start: Tensor  # of the condition in ``right``
    right: Tensor  # of each condition, for all other ids, and for each from the first one on

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in state.items():
            self.register_buffer(name, value)
        self.steps = [part[-1] for part in self.depth.split(TREES) if len(part) for part in [part.tolist()]]

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return the outputs ``[B, O]``, float64 if the device has it, of ids ``[B, D]`` and numbers ``[B, width]``."""
        if torch.compiler.is_compiling():  # a program takes any number of rows at once
            return self._sums(ids, numbers)
        blocks = zip(ids.split(ROWS), numbers.split(ROWS), strict=True)
        return torch.cat([self._sums(*block) for block in blocks])

    def _sums(self, ids: Tensor, numbers: Tensor) -> Tensor:
        bits = F.pad(self._conditions(ids, numbers), (1, 0))
        bits, offset = bits.flatten(), torch.arange(len(bits), device=bits.device, dtype=torch.int32) * bits.shape[1]
        sums = float64_if_supported(self.bias).expand(len(offset), -1)
        for steps, root, output in zip(self.steps, self.root.split(TREES), self.output.split(TREES), strict=False):
            start = offset[:, None].expand(-1, len(root)).flatten()
            node = root.expand(len(offset), -1).flatten()  # [B x T]
            for _ in range(steps):
                bit = bits.index_select(0, start + self.condition.index_select(0, node))
                node = self.left.index_select(0, node) + bit
            values = float64_if_supported(self.value.index_select(0, node)).view(-1, len(root))
            sums = sums + values @ F.one_hot(output.long(), len(self.bias)).to(values.dtype)
        return sums

    def _conditions(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return whether each condition is true, int32 ``[B, conditions]``."""
        parts = []
        if len(self.threshold):
            x = numbers.index_select(1, self.number_column)
            parts.append((x > self.threshold) | (x.isnan() & self.nan))
        if len(self.size):
            index = ids.int().index_select(1, self.id_column) - self.first
            index = self.start + torch.where((index >= 0) & (index < self.size), index + 1, 0)
            parts.append(self.right.index_select(0, index.flatten()).view_as(index))  # ONNX has no other int32 index
        return torch.cat(parts, 1).int() if parts else ids.new_zeros(len(ids), 0, dtype=torch.int32)
