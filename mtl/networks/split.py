"""Make experts of a dense feed-forward layer: copies of it (MT-TaG), or parts of it (MoEBERT: Zuo et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mtl.checks import InputError, first_line, require


def expert_neurons(order: Tensor, num_experts: int, width: int, shared: int) -> Tensor:
    """Return the hidden units of each expert, ``[E, width]``; ``order [W]`` ranks the units of the dense layer.

    All experts get the first ``shared`` units. The other units are dealt to the experts in turn until each has
    ``width`` units in all; the last units may go to no expert.
    """
    require(shared <= width, f"network.shared_neurons={shared}: an expert has only {width} neurons")
    rest = order[shared:]
    dealt = [torch.cat([order[:shared], rest[expert::num_experts]])[:width] for expert in range(num_experts)]
    short = min(map(len, dealt))
    require(
        short == width,
        f"experts.width={width} is too large: {len(order)} neurons with {shared} shared give {num_experts} experts "
        f"{short} each",
    )
    return torch.stack(dealt)


def split_ffn(dense: Mapping[str, Tensor], neurons: Tensor) -> dict[str, Tensor]:
    """Return the weights of E experts that consist of the ``neurons [E, width]`` of a dense layer.

    ``dense`` holds the weights of a ``StackedFFN`` of one expert. Everything but the hidden units is copied to all
    experts.
    """
    num_experts = len(neurons)
    up, down = dense["up.weight"][0], dense["down.weight"][0]  # [W, D], [D, W]
    parts = {
        "up.weight": up[neurons],  # [E, width, D]
        "up.bias": dense["up.bias"][0][neurons],
        "down.weight": down[:, neurons].transpose(0, 1).contiguous(),  # [E, D, width]
    }
    rest = {name: value for name, value in dense.items() if name not in parts}
    return parts | {name: value.expand(num_experts, *value.shape[1:]).clone() for name, value in rest.items()}


def read_importance(path: str | None, depth: int, width: int) -> Tensor:
    """Return the importance ``[depth, width]`` of hidden units that ``mtl importance`` wrote to ``path``."""
    how = "mtl importance RUN writes such a file for a dense run"
    require(path is not None, f"network.start=importance needs network.importance=FILE; {how}")
    try:
        scores: Tensor = torch.load(str(path), weights_only=True, map_location="cpu")["importance"]
        shape = list(scores.shape)
    except Exception as error:  # whatever a missing, damaged or foreign file makes torch raise
        raise InputError(f"network.importance={path}: {first_line(error)}; {how}") from error
    fits = shape == [depth, width]
    require(fits, f"network.importance={path}: holds {shape}, but this encoder has {depth} layers of {width} neurons")
    return scores
