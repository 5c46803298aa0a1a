"""A Transformer encoder whose feed-forward layers are mixtures of experts (MT-TaG: Gupta et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mtl.checks import require
from mtl.experts.base import Experts
from mtl.experts.dispatch import Execution
from mtl.experts.ffn import StackedFFN
from mtl.gates.base import Gate
from mtl.gates.joined import joined, separate_gates, task_key
from mtl.gates.permuted import Permutation
from mtl.networks.base import MultiTaskNetwork, select_tasks
from mtl.networks.expert_init import ExpertInit, dense_ffn
from mtl.networks.heads import HeadPerTask, Heads
from mtl.networks.mixture import MixtureOfExperts
from mtl.networks.packing import Packing
from mtl.networks.pretrained import encoder
from mtl.options import Count, CountOrZero, Dropout, validated
from mtl.types import Categorical, DataSpec, NetworkOutput, Routing, TaskSpec, Tokens, sum_losses

HEAD_STD = 0.02  # standard deviation of the heads' initial weights, as in the paper


class TransformerLayer(nn.Module):
    """Self-attention, then a feed-forward part: y = LN(x + dropout(F(x))), on real tokens ``x [N, D]`` only.

    F is a mixture of experts, or one dense expert. Experts with their own norm (``own_norm``) include residual
    connection and LN, so their mixture is the output.
    """

    @validated
    def __init__(self, attention: Any, feed_forward: MixtureOfExperts | StackedFFN, norm: nn.Module) -> None:
        super().__init__()
        self.attention: Any = attention  # of `transformers`
        self.mixture = feed_forward if isinstance(feed_forward, MixtureOfExperts) else None
        self.dense = None if self.mixture is not None else feed_forward
        experts = feed_forward.experts if isinstance(feed_forward, MixtureOfExperts) else feed_forward
        self.norm = None if experts.own_norm else norm
        self.dropout = nn.Dropout(attention.output.dropout.p)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        packing: Packing,
        ids: Tensor,
        tasks: Sequence[int],
        by_sentence: bool,
    ) -> tuple[Tensor, Routing | None]:
        """Map ``x [N, D]`` of the tokens ``ids [N]`` to ``[N, D]`` and the routing; None for a dense layer."""
        context = self.attention.self(packing.pad(x), mask)[0]  # [B, S, D]
        x = self.attention.output(packing.pack(context), x)
        if self.mixture is None:
            assert self.dense is not None
            y, routing = self.dense(x).squeeze(1), None
        else:
            groups = (packing.row, packing.shape[0]) if by_sentence else (None, None)
            mixed, routing = self.mixture(x, {"tokens": ids}, tasks, *groups)
            y = mixed.squeeze(1)  # [N, D]
        return y if self.norm is None else self.norm(x + self.dropout(y.to(x.dtype))), routing


class Transformer(MultiTaskNetwork):
    """A Transformer encoder with mixtures of feed-forward experts, one gate and one head per task.

    Input ``tokens [B, S]``, and ``segments [B, S]`` if there are two texts. A task's head reads the state of the first
    token, and, if the task has marked words (input ``marks [B, 2, 2]``), the mean states of the tokens of the two
    words; the head of a span task reads the state of every token. Only real tokens pass through gates, experts and
    norms. Each task needs a separate pass, since its gates change all states; text data have one task per batch.

    Encoder: ``pretrained``, a folder or a name on the hub, or ``config`` with options of `transformers` for random
    weights; ``dropout`` replaces its own. ``mixture_layers``: the layers, from 0, that become mixtures (None: all; []:
    none, the dense baseline). ``experts(num_experts=, input_dim=)``, ``gate(num_tasks=, num_experts=, input_dim=,
    inputs=)`` and ``heads(tasks=, input_dim=)`` are factories; a gate reads the state of a token, or, with
    ``route="sentence"``, the mean state of the sentence. The hash gate reads the token's id.

    Experts start as copies of the dense layer (``expert_init="copy"``), or as parts of it: its most important neurons
    (``"neuron_scores"``, by the file ``neuron_scores`` that ``mtl neurons`` writes) or random neurons (``"random"``).
    ``shared_neurons`` neurons of an expert are the same in all experts (None: two thirds). With ``start_from``, a
    task starts with that run's gate of task ``initial_gate[task]``, by default that of its own name, if there is one.
    Without ``load_pretrained`` no file is read, since all weights will come from a checkpoint.
    """

    reads_files = True

    @validated
    def __init__(
        self,
        spec: DataSpec,
        num_experts: Count,
        experts: Callable[..., Experts],
        gate: Callable[..., Gate],
        heads: Callable[..., Heads],
        pretrained: str | None = None,
        config: Mapping[str, Any] | None = None,
        dropout: Dropout | None = None,
        mixture_layers: Sequence[int] | None = None,
        route: Literal["token", "sentence"] = "token",
        expert_init: Literal["copy", "neuron_scores", "random"] = "copy",
        neuron_scores: str | None = None,
        shared_neurons: CountOrZero | None = None,
        initial_gate: Mapping[str, str] | None = None,
        execution: Execution = "auto",
        permutation: Callable[..., Permutation] | None = None,
        load_pretrained: bool = True,
    ) -> None:
        super().__init__(spec)
        tokens = spec.inputs.get("tokens")
        require(isinstance(tokens, Tokens), f"network=transformer reads tokens; this data has {', '.join(spec.inputs)}")
        assert isinstance(tokens, Tokens)
        self.pad, self.by_sentence = tokens.pad, route == "sentence"
        model = encoder(pretrained, config, tokens.vocab, dropout, load_pretrained)
        size, depth = model.config.hidden_size, model.config.num_hidden_layers
        longest = model.config.max_position_embeddings
        message = f"data.max_length={tokens.length}: this encoder reads at most {longest} tokens"
        require(tokens.length <= longest, message)
        mixture_layers = range(depth) if mixture_layers is None else mixture_layers
        outside = [layer for layer in mixture_layers if not 0 <= layer < depth]
        require(not outside, f"network.mixture_layers={outside}: the layers of this encoder are 0 to {depth - 1}")
        self.encoder_config = model.config.to_diff_dict()
        self.attention_config = model.config
        self.expert_init, self.vocabulary = ExpertInit(expert_init, neuron_scores, shared_neurons, depth), tokens.digest
        self.embeddings = model.embeddings
        self.project = getattr(model, "embeddings_project", nn.Identity())
        names = [task.name for task in self.tasks]
        self.initial_gate = dict(initial_gate or {})
        unknown = [name for name in self.initial_gate if name not in names]
        require(not unknown, f"network.initial_gate: no task {', '.join(unknown)}; the tasks are {', '.join(names)}")
        ids = {"tokens": Categorical(tokens.vocab, tokens.counts)}
        layers = []
        for index, layer in enumerate(model.encoder.layer):
            dense = dense_ffn(layer)
            norm = layer.output.LayerNorm
            if index not in mixture_layers:
                layers.append(TransformerLayer(layer.attention, dense, norm))
                continue
            built = experts(num_experts=num_experts, input_dim=size)
            gates = separate_gates(gate, names, num_experts, size, ids)
            reader = next((part for part in gates.modules() if isinstance(part, Gate) and part.reads_inputs), None)
            by_token = f"{type(reader).__name__} routes each token by its id; use network.route=token"
            require(reader is None or not self.by_sentence, f"network.route=sentence: {by_token}")
            sizes = size, len(names), num_experts
            mixture = MixtureOfExperts(*sizes, gates, built, permutation=permutation, execution=execution)
            if load_pretrained:
                weights = dense.state_dict() | {"norm_weight": norm.weight[None], "norm_bias": norm.bias[None]}
                built.load_state_dict(self.expert_init.weights(index, built, weights))
            layers.append(TransformerLayer(layer.attention, mixture, norm))
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(model.config.hidden_dropout_prob)
        widths = {task.name: size * (3 if task.marked else 1) for task in self.tasks}
        of_tasks = {task.name: heads(tasks=[outputs(task)], input_dim=widths[task.name]) for task in self.tasks}
        self.heads = HeadPerTask(of_tasks)
        for name, parameter in self.heads.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(parameter, std=HEAD_STD)

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        task_ids = select_tasks(self.tasks, tasks)
        if not any(layer.mixture for layer in self.layers):
            hidden, packing, _ = self.encode(inputs, [])
            return NetworkOutput(self._predict(hidden[-1], packing, task_ids, inputs), hidden=hidden)
        predictions: dict[str, Tensor] = {}
        passes: list[dict[str, Routing]] = []
        for task in task_ids:
            hidden, packing, routings = self.encode(inputs, [task])
            predictions |= self._predict(hidden[-1], packing, [task], inputs)
            passes.append(routings)
        together = {name: joined([routings[name] for routings in passes]) for name in passes[0]}
        return NetworkOutput(predictions, together, sum_losses(together), hidden)

    def encode(
        self, inputs: Mapping[str, Tensor], tasks: Sequence[int]
    ) -> tuple[tuple[Tensor, ...], Packing, dict[str, Routing]]:
        """Return all layers' states ``[N, D]`` of real tokens, their packing, and the layers' routings.

        The states start with those of the embeddings. ``tasks``: the task whose gates route.
        """
        from transformers.masking_utils import create_bidirectional_mask

        packing = Packing(inputs["tokens"] != self.pad)
        if not len(inputs["tokens"]):  # attention takes no empty batch; evaluation with several processes has some
            nothing = self.embeddings.word_embeddings.weight.new_zeros(0, self.attention_config.hidden_size)
            return (nothing,), packing, {}
        ids = packing.pack(inputs["tokens"]).long()
        segments = packing.pack(inputs["segments"]).long() if "segments" in inputs else torch.zeros_like(ids)
        x = self.project(self.embeddings(ids[None], segments[None], packing.position[None]))[0]  # [N, D]
        padded, real = x.new_empty(()).expand(*packing.shape, x.shape[-1]), packing.mask.long()
        mask = create_bidirectional_mask(config=self.attention_config, inputs_embeds=padded, attention_mask=real)
        hidden, routings = [x], {}
        for index, layer in enumerate(self.layers):
            x, routing = layer(x, mask, packing, ids, tasks, self.by_sentence)
            hidden.append(x)
            if routing is not None:
                routings[f"layers.{index}.mixture"] = routing
        return tuple(hidden), packing, routings

    def get_extra_state(self) -> dict[str, str]:
        return {"vocabulary": self.vocabulary}

    def set_extra_state(self, state: Mapping[str, str]) -> None:
        """Raise InputError if the weights that are loaded belong to another vocabulary."""
        other = state.get("vocabulary", "")
        require(
            not other or not self.vocabulary or other == self.vocabulary,
            "the weights were trained with another vocabulary of tokens: give data.tokenizer the folder that the log "
            "of their run names",
        )

    def fsdp_units(self) -> Sequence[nn.Module]:
        """See ``MultiTaskNetwork``."""
        return list(self.layers)

    def convert_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Convert the weights of another run's Transformer to the names and shapes of this one.

        Its dense layers become experts, as ``expert_init`` says. A task in ``initial_gate`` gets a copy of
        the gate of the task that is named there.
        """
        self.set_extra_state(state.pop("_extra_state", {}))
        layers: Any = self.layers
        for index, layer in enumerate(layers):
            prefix = f"layers.{index}."
            names = [name for name in state if name.startswith(f"{prefix}dense.")]
            dense = {name.removeprefix(f"{prefix}dense."): state.pop(name) for name in names}
            if layer.mixture is None or not dense:
                state |= {f"{prefix}dense.{name}": value for name, value in dense.items()}
                continue
            dense |= {f"norm_{kind}": state[f"{prefix}norm.{kind}"][None] for kind in ("weight", "bias")}
            experts = self.expert_init.weights(index, layer.mixture.experts, dense)
            state |= {f"{prefix}mixture.experts.{name}": value for name, value in experts.items()}
        copies: dict[str, Any] = {}
        for task, other in self.initial_gate.items():
            source, target = f"gates.{task_key(other)}.", f"gates.{task_key(task)}."
            gate = {name.replace(source, target): value for name, value in state.items() if source in name}
            require(bool(gate), f"network.initial_gate.{task}={other}: start_from has no gate of that task")
            copies |= gate
        state |= copies
        return state

    def _predict(
        self, states: Tensor, packing: Packing, task_ids: Sequence[int], inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the predictions of the tasks ``task_ids`` from the states ``[N, D]`` of the last layer."""
        first = self.dropout(states.index_select(0, packing.first))[:, None]
        predictions: dict[str, Tensor] = {}
        for task in task_ids:
            spec = self.tasks[task]
            if spec.kind == "span":
                logits = self.heads(self.dropout(states)[:, None], [task])[spec.name]  # [N, 2]
                lowest = torch.finfo(logits.dtype).min
                predictions[spec.name] = packing.pad(logits).masked_fill(~packing.mask[..., None], lowest)
            elif spec.marked:
                marked = self.dropout(mean_states(packing.pad(states), inputs["marks"]))  # [B, 2, D]
                predictions |= self.heads(torch.cat([first, marked.flatten(1)[:, None]], dim=-1), [task])
            else:
                predictions |= self.heads(first, [task])
        return predictions


def mean_states(states: Tensor, marks: Tensor) -> Tensor:
    """Return the mean states ``[B, 2, D]`` of two words; ``states [B, S, D]``, ``marks [B, 2, 2]`` (first, last)."""
    position = torch.arange(states.shape[1], device=states.device)
    inside = (position >= marks[..., :1]) & (position <= marks[..., 1:])  # [B, 2, S]
    return inside.to(states.dtype) @ states / inside.sum(-1, keepdim=True)


def outputs(task: TaskSpec) -> TaskSpec:
    """Return the task whose head gives the outputs of ``task``: a span task has two of each token."""
    task = replace(task, marked=False)
    return replace(task, kind="multiclass", num_classes=2, metrics=()) if task.kind == "span" else task
