"""Rank the hidden units of a dense Transformer run: ``mtl neurons RUN``.

``network.expert_init=neuron_scores network.neuron_scores=FILE`` splits dense layers into experts by this ranking
(MoEBERT: Zuo et al. 2022, section 3.1). The importance of hidden unit j is
I_j = sum_n | w1_j . dL_n/dw1_j + w2_j . dL_n/dw2_j |, with w1_j and w2_j its weights into and out of the layer, and L_n
the loss of sample n. One backward pass of the summed loss gives it for all samples: the inner term is the sum over the
tokens s of sample n of da_sj (a_sj - b_j) + dh_sj h_sj, with the pre-activation a_sj = w1_j . x_s + b_j, the activation
h_sj, and d the gradients of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from mtl.checkpoints.files import read
from mtl.checkpoints.restore import restore_data
from mtl.checks import require
from mtl.config import build
from mtl.config.resume import config_to_load
from mtl.experts.ffn import StackedFFN
from mtl.files.writing import writing
from mtl.networks.packing import Packing
from mtl.networks.transformer import Transformer
from mtl.training.losses import task_loss_sums
from mtl.types import Batch, TaskSpec
from mtl.use.trained import model_of


class Recorder:
    """Record the input and output of the activation of a dense feed-forward layer, and their gradients.

    The end of ``hooks`` ends the recording.
    """

    def __init__(self, layer: StackedFFN, hooks: ExitStack) -> None:
        self.bias = layer.up.bias.detach()[0]
        self.values: list[Tensor] = []  # a and h, [N, 1, W] each
        hooks.enter_context(layer.up.register_forward_hook(lambda module, args, output: self._keep(output)))
        hooks.enter_context(layer.down.register_forward_pre_hook(lambda module, args: self._keep(args[0])))

    def _keep(self, value: Tensor) -> None:
        value.retain_grad()
        self.values.append(value)

    def scores(self, rows: Tensor, num_rows: int) -> Tensor:
        """Return the importance ``[W]`` over the samples of a batch; ``rows [N]`` is the sample of each token."""
        (a, da), (h, dh) = ((value.detach()[:, 0], value.grad[:, 0]) for value in self.values if value.grad is not None)
        terms = da * (a - self.bias) + dh * h  # [N, W]
        self.values = []
        return terms.new_zeros(num_rows, terms.shape[1]).index_add(0, rows, terms).abs().sum(0)


def neuron_scores(network: Transformer, tasks: Mapping[str, TaskSpec], batches: Iterable[Batch]) -> Tensor:
    """Return the scores ``[layers, W]`` of the hidden units of all dense layers over ``batches``.

    This puts ``network`` into evaluation mode, without dropout, and clears its gradients.
    """
    layers: list[Any] = list(network.layers)
    dense = [layer.dense for layer in layers]
    require(all(dense), "neurons are ranked in dense layers: the run needs network.mixture_layers=[]")
    total: Tensor | None = None
    network.eval()
    with ExitStack() as hooks, torch.enable_grad():
        recorders = [Recorder(layer, hooks) for layer in dense]
        for batch in batches:
            if not len(batch):
                continue
            output = network(batch.inputs, list(batch.targets))
            loss = task_loss_sums(tasks, output.predictions, batch.targets)[1].sum()
            torch.autograd.backward(loss)
            rows = Packing(batch.inputs["tokens"] != network.pad).row
            scores = torch.stack([recorder.scores(rows, len(batch)) for recorder in recorders])
            total = scores if total is None else total + scores
            network.zero_grad()
    require(total is not None, "the scores of neurons need at least one batch")
    assert total is not None
    return total


def write_neuron_scores(
    path: str | Path, file: Path, trust: Sequence[str] = (), data_dir: str | None = None
) -> tuple[int, int]:
    """Write the scores ``[layers, W]`` of a run's network over its validation rows; return the shape.

    ``data_dir``: the folder of the data, by default as for ``paths.data_dir``. For ``path`` and ``trust`` see
    ``mtl.load``.
    """
    checkpoint = read(path)
    cfg = config_to_load(checkpoint, trust, data_dir)
    data: Any = build.build_data(cfg)
    restore_data(data, checkpoint, "use")
    data.setup()
    network = model_of(checkpoint, cfg, "cpu").network
    require(isinstance(network, Transformer), f"{path}: neurons are ranked for network=transformer only")
    assert isinstance(network, Transformer)
    console, batches = Console(stderr=True), data.val_dataloader()
    shown = track(batches, file.name, len(batches), console=console, transient=True, disable=not console.is_terminal)
    scores = neuron_scores(network, {task.name: task for task in network.tasks}, shown)
    with writing(file) as opened:
        torch.save({"neuron_scores": scores.cpu()}, opened)
    return scores.shape[0], scores.shape[1]
