"""Make experts of a dense feed-forward layer: copies of it (MT-TaG), or parts of it (MoEBERT: Zuo et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtl.checks import InputError, first_line, require
from mtl.experts.ffn import StackedFFN


class ExpertInit:
    """How the experts of an encoder with ``depth`` layers start, see ``Transformer``."""

    def __init__(self, kind: str, scores_file: str | None, shared: int | None, depth: int) -> None:
        self.kind, self.scores_file, self.shared, self.depth = kind, scores_file, shared, depth

    def weights(self, layer: int, experts: Any, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of ``experts``, made of the weights of the ``dense`` part of layer number ``layer``."""
        width = dense["up.weight"].shape[1]
        if self.kind == "copy":
            require(
                experts.width == width,
                f"network.expert_init=copy: experts have {experts.width} neurons (experts.width), the dense layer that "
                f"they copy has {width}; give experts.width={width}, or use network.expert_init=neuron_scores",
            )
            neurons = torch.arange(width).expand(experts.num_experts, -1)
        else:
            if self.kind == "random":
                order = torch.randperm(width)
            else:
                scores = read_neuron_scores(self.scores_file, self.depth, width)
                order = scores[layer].argsort(descending=True, stable=True)
            shared = experts.width * 2 // 3 if self.shared is None else self.shared
            neurons = expert_neurons(order.cpu(), experts.num_experts, experts.width, shared)
        names = set(experts.state_dict())
        return {name: value for name, value in split_ffn(dense, neurons).items() if name in names}


def dense_ffn(layer: Any) -> StackedFFN:
    """Return the feed-forward part of a layer of `transformers` as one expert."""
    up, down = layer.intermediate.dense, layer.output.dense
    dense = StackedFFN(1, up.in_features, up.out_features)
    weights = {"up.weight": up.weight, "up.bias": up.bias, "down.weight": down.weight, "down.bias": down.bias}
    dense.load_state_dict({name: value.detach()[None] for name, value in weights.items()})
    return dense.to(up.weight.dtype)


def expert_neurons(order: Tensor, num_experts: int, width: int, shared: int) -> Tensor:
    """Return the hidden units of each expert, ``[E, width]``; ``order [W]`` ranks the units of the dense layer.

    All experts get the first ``shared`` units. The other units are dealt to the experts in turn until each has
    ``width`` units in all; the last units may go to no expert.
    """
    require(shared <= width, f"network.shared_neurons={shared}: an expert has only {width} neurons")
    rest = order[shared:]
    dealt = [torch.cat([order[:shared], rest[expert::num_experts]])[:width] for expert in range(num_experts)]
    short = min(map(len, dealt))
    most = f"{len(order)} neurons with {shared} shared give {num_experts} experts {short} each"
    require(short == width, f"experts.width={width} is too large: {most}")
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


def read_neuron_scores(path: str | None, depth: int, width: int) -> Tensor:
    """Return the scores ``[depth, width]`` of hidden units that ``mtl neurons`` wrote to ``path``."""
    how = "mtl neurons RUN writes such a file for a dense run"
    require(path is not None, f"network.expert_init=neuron_scores needs network.neuron_scores=FILE; {how}")
    try:
        scores: Tensor = torch.load(str(path), weights_only=True, map_location="cpu")["neuron_scores"]
        shape = list(scores.shape)
    except Exception as error:  # whatever a missing, damaged or foreign file makes torch raise
        raise InputError(f"network.neuron_scores={path}: {first_line(error)}; {how}") from error
    fits = shape == [depth, width]
    message = f"network.neuron_scores={path}: holds {shape}, but this encoder has {depth} layers of {width} neurons"
    require(fits, message)
    return scores
