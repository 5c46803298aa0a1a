"""The Transformer against `transformers`, dense against mixture, sparse against dense, packed against padded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtl.checks import InputError
from mtl.gates import CometGate, HashGate, SoftmaxGate, TaskTop1Gate, TopKGate
from mtl.gates.permuted import Permutation
from mtl.networks.pretrained import from_scratch
from mtl.networks.transformer import Transformer
from mtl.training.losses import task_loss_sums
from tests.transformers import CONFIG, LENGTH, assert_close, save_encoder, shake, tokens, transformer

TINY = 1e-10
TOP1 = partial(TaskTop1Gate, bias=False, initial_std=0.001, keep_scale=True)
GATES = {
    "softmax": SoftmaxGate,
    "topk": partial(TopKGate, k=2),
    "hash": HashGate,
    "comet": partial(CometGate, k=2, gamma=0.1, entropy_weight=0.1),
    "top1": TOP1,
    "switch": partial(TOP1, shared=True),
    "local search": partial(TopKGate, k=1),
}
# Every gate by token and by sentence, but for the hash gate, which reads tokens
ROUTES = [(name, route) for name in GATES for route in ("token", "sentence") if (name, route) != ("hash", "sentence")]
TARGETS = {
    "a": torch.tensor([1.0, 0.0, 1.0, float("nan")]),
    "b.c": torch.tensor([2, 0, 1, 1]),
    "type": torch.tensor([0.4, 0.1, 0.9, 0.6]),
}


def options_of(name: str) -> dict[str, Any]:
    return {"permutation": partial(Permutation, tau=0.1)} if name == "local search" else {}


def step(
    network: Transformer, inputs: dict[str, Tensor], task: str = "a"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (predictions, losses and states) and the gradients of a training step."""
    network.zero_grad()
    output = network(inputs, [task])
    spec = {name.name: name for name in network.tasks}
    losses = task_loss_sums(
        spec, output.predictions, {task: TARGETS[task].double() if task != "b.c" else TARGETS[task]}
    )
    total = losses[1].sum() + sum(output.losses.values()) + output.hidden[-1].square().sum() / 100
    total.backward()
    values = {"loss": losses[1].detach(), "prediction": output.predictions[task].detach(), **output.losses}
    values |= {str(index): state.detach() for index, state in enumerate(output.hidden)}
    return values, {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_dense_network_equals_transformers(kind: str, tmp_path: Path) -> None:
    """Every hidden state of real tokens, and every gradient."""
    model, inputs = save_encoder(tmp_path, kind), tokens(padded=2)
    network = transformer(SoftmaxGate, pretrained=str(tmp_path), mixture_layers=[], dropout=None).eval()
    mask = inputs["tokens"] != 0
    expected = model(inputs["tokens"], mask.long(), inputs["segments"], output_hidden_states=True).hidden_states
    hidden = network(inputs, ["a"]).hidden
    assert len(hidden) == len(expected) == CONFIG["num_hidden_layers"] + 1
    for ours, theirs in zip(hidden, expected, strict=True):
        torch.testing.assert_close(ours, theirs[mask], rtol=TINY, atol=TINY)
    hidden[-1].sin().sum().backward()
    expected[-1][mask].sin().sum().backward()
    theirs = {name.replace("encoder.layer", "layers"): p.grad for name, p in model.named_parameters()}
    names = {"intermediate.dense": "dense.up", "output.dense": "dense.down", "output.LayerNorm": "norm"}
    for name, gradient in theirs.items():
        if "attention" not in name:
            for old, new in names.items():
                name = name.replace(old, new)
        ours = network.get_parameter(name.replace("embeddings_project", "project")).grad
        torch.testing.assert_close(ours.view_as(gradient), gradient, rtol=TINY, atol=TINY)


@pytest.mark.parametrize(("name", "route"), ROUTES)
def test_mixture_of_copies_equals_dense(name: str, route: str) -> None:
    """In states and gradients; the gradient of a dense weight is the sum of those of its copies."""
    dense = transformer(SoftmaxGate, mixture_layers=[])
    network = transformer(GATES[name], seed=1, route=route, **options_of(name))
    missing = network.load_state_dict(network.convert_state_dict(dense.state_dict()), strict=False)
    assert not missing.unexpected_keys
    assert not [key for key in missing.missing_keys if ".gate." not in key and "_extra_state" not in key]
    if name in ("top1", "switch"):  # whose weights are 1, but carry the gate's gradient, which is 0 at this point
        for key, parameter in network.named_parameters():
            if ".gate." in key:
                nn.init.zeros_(parameter)
    (expected, dense_gradients), (found, gradients) = (states_and_gradients(part) for part in (dense, network))
    assert_close(found, expected)
    assert_close({key: value for key, value in gradients.items() if ".gate." not in key}, dense_gradients)


def states_and_gradients(network: Transformer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the states of all layers and the gradients of their weights, summed over experts."""
    hidden = network(tokens(), ["a"]).hidden
    hidden[-1].sin().sum().backward()
    gradients = {}
    for name, parameter in network.named_parameters():
        stacked = ".experts." in name or name.startswith(tuple(f"layers.{index}.dense." for index in range(2)))
        if parameter.grad is not None:
            gradient = parameter.grad.sum(0) if stacked else parameter.grad
            gradients[name.replace("mixture.experts", "dense")] = gradient
    return {str(index): state.detach() for index, state in enumerate(hidden)}, gradients


@pytest.mark.parametrize("own_norm", [False, True])
@pytest.mark.parametrize(("name", "route"), [case for case in ROUTES if case[0] in ("hash", "comet")])
def test_sparse_equals_dense(name: str, route: str, own_norm: bool) -> None:
    """With dropout everywhere, also inside the experts."""
    results = []
    for execution in ("dense", "sparse"):
        options = {"route": route, "own_norm": own_norm, "dropout": 0.1, "expert_dropout": 0.25}
        network = transformer(GATES[name], execution=execution, **options).train()
        shake(network)
        torch.manual_seed(9)
        results.append(step(network, tokens()))
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1])


@pytest.mark.parametrize(("name", "route"), ROUTES)
def test_padding_changes_nothing(name: str, route: str) -> None:
    network = transformer(GATES[name], route=route, **options_of(name))
    shake(network)
    (values, gradients), (padded, padded_gradients) = (step(network, tokens(padded=more), "b.c") for more in (0, 3))
    assert_close(values, padded)
    assert_close(gradients, padded_gradients)


@pytest.mark.parametrize("name", ["softmax", "comet", "top1"])
def test_step_of_one_task_leaves_the_others_alone(name: str) -> None:
    network = transformer(GATES[name])
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.1)
    for task in TARGETS:  # every gate and head has momentum now
        step(network, tokens(), task)
        optimizer.step()
    before = {key: value.clone() for key, value in network.state_dict().items() if isinstance(value, Tensor)}
    for _ in range(3):
        step(network, tokens(seed=1), "a")
        optimizer.step()
    for key, value in before.items():
        changed = not torch.equal(value, network.state_dict()[key])
        if "task_" in key:
            assert changed == ("task_a" in key), key
        elif "experts" in key and name != "top1":
            assert changed, key


def test_all_tasks_in_one_batch_equal_each_alone() -> None:
    network = transformer(GATES["comet"]).eval()
    shake(network)
    together = network(tokens())
    assert [list(r.tasks or ()) for r in together.routings.values()] == [[0, 1, 2]] * 2
    for index, task in enumerate(TARGETS):
        alone = network(tokens(), [task])
        assert_close({"p": together.predictions[task]}, {"p": alone.predictions[task]})
        for name, routing in alone.routings.items():
            assert_close({"w": together.routings[name].weights[:, [index]]}, {"w": routing.weights})
    entropies = sum(network(tokens(), [task]).losses["entropy"] for task in TARGETS)
    assert_close({"l": together.losses["entropy"]}, {"l": entropies})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"hidden_size": 30, "num_attention_heads": 4}}, "no multiple"),
        ({"config": {"width": 3}}, r"network\.config\.width"),
        ({"config": {"model_type": "gpt2"}}, "must be one of bert, electra"),
        ({"config": {"max_position_embeddings": 5}}, f"data.max_length={LENGTH}"),
        ({"mixture_layers": [2]}, r"mixture_layers=\[2\]"),
        ({"pretrained": "/no/such/folder"}, "network.pretrained=/no/such/folder: "),
        ({"width": 16}, "network.expert_init=copy: experts have 16 neurons .* give experts.width="),
        ({"expert_init": "neuron_scores"}, "needs network.neuron_scores"),
    ],
)
def test_wrong_option_is_one_message(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        transformer(SoftmaxGate, **options)


def test_damaged_pretrained_folder_is_one_message(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    file = tmp_path / "model.safetensors"
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    weights.pop("encoder.layer.1.output.dense.bias")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks the weights encoder\.layer\.1\.output\.dense\.bias"):
        transformer(SoftmaxGate, pretrained=str(tmp_path))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match=f"network.pretrained={tmp_path}"):
        transformer(SoftmaxGate, pretrained=str(tmp_path))


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}])
@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_stored_configuration_gives_the_same_encoder(kind: str, sizes: dict[str, int]) -> None:
    """BERT base, whose sizes are the defaults of `transformers`, and MiniLM, whose 12 heads are: ours are others."""
    import transformers

    config = {"bert": transformers.BertConfig, "electra": transformers.ElectraConfig}[kind](**sizes)
    again = from_scratch(config.to_diff_dict(), 100)
    assert again.to_dict() == config.to_dict()
