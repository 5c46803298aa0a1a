"""Start a new run from the weights of another one: ``start_from=RUN/checkpoints/best.ckpt``."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mtl.checkpoints.files import Checkpoint
from mtl.checks import InputError, join_names
from mtl.gates.base import Gate
from mtl.networks.base import MultiTaskNetwork
from mtl.networks.bottom import HashEmbedding

log = logging.getLogger(__name__)


def start_from(network: nn.Module, checkpoint: Checkpoint, same_ids: bool = False) -> None:
    """Copy every weight of ``checkpoint`` whose name and shape fit ``network``, and log the others.

    Weights are parameters and buffers. Scalar buffers, such as a temperature, and the pattern of a fixed gate are
    options, so they keep the values of the new run. With ``same_ids``, ids mean the same in both runs, and the rows of
    embeddings for new ids start as the mean of the known ones. The checkpoint's weights and extra states first pass
    through ``MultiTaskNetwork.convert_state_dict``. Nothing else of the checkpoint is used. Raises InputError if no
    weight fits.
    """
    state = checkpoint.weights()
    if isinstance(network, MultiTaskNetwork):
        state = network.convert_state_dict(state)
    options = {name for name, buffer in network.named_buffers() if buffer.dim() == 0 and buffer.is_floating_point()}
    gates = [(name, module) for name, module in network.named_modules() if isinstance(module, Gate)]
    options |= {f"{name}.{buffer}" for name, gate in gates for buffer in gate.option_buffers}
    state = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in options}
    network_state = {
        name: value for name, value in network.state_dict().items() if isinstance(value, Tensor) and name not in options
    }
    for name in _tables(network) if same_ids else ():
        if name in state and name in network_state:
            state[name] = _with_mean(state[name], network_state[name])
    fitting = {name: value for name, value in state.items() if _fits(value, network_state.get(name))}
    if not fitting:
        raise InputError(
            f"start_from={checkpoint.path}: none of its weights fits this network; it has {grouped(state)}, and the "
            f"network has {grouped(network_state)}"
        )
    network.load_state_dict(fitting, strict=False)
    left_out = {
        "not in the checkpoint": [name for name in network_state if name not in state],
        "not in this network": [name for name in state if name not in network_state],
        "of another shape": [name for name in network_state if name in state and name not in fitting],
    }
    reports = [f"; {reason}: {grouped(names)}" for reason, names in left_out.items() if names]
    counts = len(fitting), len(network_state)
    log.info("start_from=%s: %d of %d tensors are set%s", checkpoint.path, *counts, "".join(reports))


def grouped(names: Iterable[str]) -> str:
    """List the modules of the named weights with their numbers of weights; module numbers are replaced by ``*``."""
    modules = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name.rpartition(".")[0] or name) for name in names)
    return join_names(f"{module} ({count})" for module, count in modules.items()) or "none"


def _tables(network: nn.Module) -> list[str]:
    """Return the names of the tables with a row for each id; the rows of hashed tables stand for other ids."""
    modules = dict(network.named_modules())
    hashed = {f"{name}.table" for name, module in modules.items() if isinstance(module, HashEmbedding)}
    tables = (name for name, module in modules.items() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return [f"{name}.weight" for name in tables if name not in hashed]


def _with_mean(value: Tensor, target: Tensor) -> Tensor:
    """Return the rows of ``value`` and, up to the number of rows of ``target``, the mean of all but the first one.

    The first row is of unknown ids, or padding.
    """
    if len(value) >= len(target) or value.shape[1:] != target.shape[1:]:
        return value
    return torch.cat([value, value[1:].mean(0, keepdim=True).expand(len(target) - len(value), -1)])


def _fits(value: Tensor, target: Tensor | None) -> bool:
    if target is None:
        return False
    return value.shape == target.shape and value.is_floating_point() == target.is_floating_point()
