"""Weights of another run: experts made of dense layers, their importance, gates of other tasks, vocabularies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtl.checks import InputError
from mtl.gates import CometGate, SoftmaxGate
from mtl.networks.expert_init import expert_neurons, read_neuron_scores
from mtl.networks.transformer import Transformer
from mtl.training.losses import task_loss_sums
from mtl.types import Batch, DataSpec, TaskSpec
from mtl.use.neurons import neuron_scores
from tests.transformers import SPEC, TASKS, save_encoder, shake, tokens, transformer

TINY = 1e-10
GATES = {"comet": partial(CometGate, k=2, gamma=0.1, entropy_weight=0.1)}
TARGETS = {"a": torch.tensor([1.0, 0.0, 1.0, float("nan")])}


@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_importance_in_one_pass_equals_gradients_of_each_sample(kind: str, tmp_path: Path) -> None:
    save_encoder(tmp_path, kind)
    network = transformer(SoftmaxGate, pretrained=str(tmp_path), mixture_layers=[], dropout=0.5)
    tasks = {task.name: task for task in TASKS}
    batches = [Batch(tokens(), {"a": TARGETS["a"]}), Batch(tokens([3, 8], seed=2), {"b.c": torch.tensor([1, 2])})]
    found = neuron_scores(network, tasks, batches)
    expected = torch.zeros_like(found)
    for batch in batches:
        for row in range(len(batch)):
            network.zero_grad()
            one = batch.select(torch.tensor([row]))
            task_loss_sums(tasks, network(one.inputs, list(one.targets)).predictions, one.targets)[1].sum().backward()
            for index, layer in enumerate(network.layers):
                up, down = layer.dense.up.weight, layer.dense.down.weight  # [1, W, D], [1, D, W]
                expected[index] += ((up * up.grad).sum(2) + (down * down.grad).sum(1)).abs()[0]
    torch.testing.assert_close(found, expected, rtol=TINY, atol=TINY)
    assert (found > 0).all()


def test_neurons_of_experts() -> None:
    """Two cases by hand: four experts of 4 of 16 neurons, two of 4 of 8; each with two shared."""
    neurons = expert_neurons(torch.arange(16), 4, 4, 2)
    assert neurons.tolist() == [[0, 1, 2, 6], [0, 1, 3, 7], [0, 1, 4, 8], [0, 1, 5, 9]]
    neurons = expert_neurons(torch.tensor([5, 2, 7, 0, 3, 6, 1, 4]), 2, 4, 2)
    assert neurons.tolist() == [[5, 2, 7, 3], [5, 2, 0, 6]]
    with pytest.raises(InputError, match="too large"):
        expert_neurons(torch.arange(8), 4, 4, 2)
    with pytest.raises(InputError, match="shared_neurons=5"):
        expert_neurons(torch.arange(8), 2, 4, 5)


@pytest.mark.parametrize("expert_init", ["neuron_scores", "random"])
@pytest.mark.parametrize("own_norm", [False, True])
def test_experts_are_parts_of_the_dense_layer(expert_init: str, own_norm: bool, tmp_path: Path) -> None:
    dense, file = transformer(SoftmaxGate, mixture_layers=[]), tmp_path / "neuron_scores.pt"
    shake(dense)
    scores = torch.rand(2, 64)
    torch.save({"neuron_scores": scores}, file)
    options = {"neuron_scores": str(file)} if expert_init == "neuron_scores" else {}
    network = transformer(
        SoftmaxGate, width=16, expert_init=expert_init, shared_neurons=4, own_norm=own_norm, **options
    )
    state = dense.state_dict()
    network.load_state_dict(network.convert_state_dict(dict(state)), strict=False)
    for index, layer in enumerate(network.layers):
        experts, original = layer.mixture.experts, state[f"layers.{index}.dense.up.weight"][0]  # [E, 16, D], [64, D]
        neurons = [[int((original == row).all(1).nonzero()) for row in expert] for expert in experts.up.weight]
        down = state[f"layers.{index}.dense.down.weight"][0]
        assert all(torch.equal(e, down[:, n]) for e, n in zip(experts.down.weight, neurons, strict=True))
        assert all(n[:4] == neurons[0][:4] for n in neurons)
        rest = [neuron for n in neurons for neuron in n[4:]]
        assert len(set(rest) | set(neurons[0][:4])) == 4 + 4 * 12
        if expert_init == "neuron_scores":
            assert neurons[0][:4] == scores[index].argsort(descending=True)[:4].tolist()
        if own_norm:
            assert all(torch.equal(row, state[f"layers.{index}.norm.weight"]) for row in experts.norm_weight)


@pytest.mark.parametrize("content", [b"", b"text", {"neuron_scores": torch.rand(2, 3)}, {"other": torch.rand(2, 64)}])
def test_wrong_file_of_importance_is_one_message(content: Any, tmp_path: Path) -> None:
    file = tmp_path / "neuron_scores.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(InputError, match="neuron_scores"):
        read_neuron_scores(str(file), 2, 64)
    for path in (None, str(tmp_path / "none.pt")):
        with pytest.raises(InputError, match="mtl neurons RUN"):
            read_neuron_scores(path, 2, 64)


def test_gate_of_another_task() -> None:
    """An unseen task starts with the gate of a known one, or with a random one."""
    old = transformer(GATES["comet"])
    shake(old)
    spec = DataSpec(SPEC.inputs, [TaskSpec("x", "binary"), TaskSpec("y", "binary"), TASKS[0]])
    network = transformer(GATES["comet"], seed=7, spec=spec, initial_gate={"x": "b.c"})
    fresh = {key: value.clone() for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    known = old.state_dict()
    network.load_state_dict(network.convert_state_dict(old.state_dict()), strict=False)
    for key, value in network.state_dict().items():
        if ".gates." in key:
            expected = fresh[key] if "task_y" in key else known[key.replace("task_x", "task_b%2Ec")]
            assert torch.equal(value, expected), key
    with pytest.raises(InputError, match=r"network.initial_gate.x=nobody: start_from has no gate of that task"):
        transformer(GATES["comet"], spec=spec, initial_gate={"x": "nobody"}).convert_state_dict(old.state_dict())
    with pytest.raises(InputError, match=r"network.initial_gate: no task z; the tasks are x, y, a"):
        transformer(GATES["comet"], spec=spec, initial_gate={"z": "b.c"})


def test_weights_of_another_vocabulary_are_refused() -> None:
    def network(digest: str) -> Transformer:
        described = DataSpec(SPEC.inputs | {"tokens": replace(SPEC.inputs["tokens"], digest=digest)}, TASKS)
        return transformer(SoftmaxGate, spec=described)

    old = network("one").state_dict()
    network("one").load_state_dict(old)
    network("").load_state_dict(old)
    for load in (network("two").load_state_dict, network("two").convert_state_dict):
        with pytest.raises(InputError, match="another vocabulary"):
            load(dict(old))
