"""Target attention (DIN) and cross layers (DCN V2): the equations in numpy, padding, and every network on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from mtl.checks import InputError
from mtl.config import build, check
from mtl.networks.bottom import TabularBottom, build_bottom
from mtl.networks.cross import CrossBottom
from mtl.networks.text import TextBottom
from mtl.types import Bag, Categorical, DataSpec, Image, InputSpec, Numeric, TaskSpec
from tests import transformers
from tests.integration.helpers import composed

Values = dict[str, NDArray[Any]]
INPUTS: dict[str, InputSpec] = {
    "item": Categorical(4),
    "seen": Bag(5, 3, "item"),
    "liked": Bag(5, 2, "item"),
    "tags": Bag(3, 2),
    "x": Numeric(2),
}
ROWS = {
    "item": torch.tensor([0, 1, 3, 2]),  # 0: unknown in training
    "seen": torch.tensor([[2, 4, 0], [0, 0, 0], [1, 2, 2], [3, 0, 0]]),
    "liked": torch.tensor([[4, 0], [0, 0], [4, 3], [0, 0]]),
    "tags": torch.tensor([[1, 2], [2, 0], [0, 0], [1, 0]]),
    "x": torch.arange(8, dtype=torch.float64).view(4, 2) - 3,
}


def attended(p: Values, unit: str, table: NDArray[Any], history: list[int], target: int) -> NDArray[Any]:
    """Return v of Zhou et al. 2018, equation 3: a list is in the table's ids, its target in those less 1."""
    total = np.zeros(table.shape[1], dtype=complex)
    for id in history:
        if id != 0:
            h, t = table[id], table[target + 1]
            hidden = p[f"{unit}.0.weight"] @ np.concatenate([h, t, h - t, h * t]) + p[f"{unit}.0.bias"]
            hidden = np.where(hidden.real > 0, hidden, p[f"{unit}.1.weight"] * hidden)
            total = total + (p[f"{unit}.2.weight"] @ hidden + p[f"{unit}.2.bias"]) * h
    return total


def embedded(p: Values) -> NDArray[Any]:
    """Return the features ``[B, D]`` of ``ROWS``."""
    items, tags, features = p["embeddings.0.weight"], p["embeddings.1.weight"], []
    for row in range(4):
        item, seen, liked, tagged, x = (values[row].tolist() for values in ROWS.values())
        some = [tags[tag] for tag in tagged if tag] or [np.zeros(tags.shape[1])]
        parts = [items[item + 1], np.mean(some, 0)]
        parts += [attended(p, f"attention.{n}.unit", items, ids, item) for n, ids in enumerate((seen, liked))]
        features.append(np.concatenate([*parts, x]))
    return np.array(features)


def crossed(p: Values) -> NDArray[Any]:
    """Return x_L of Wang et al. 2021, equations 1 and 2."""
    first = x = embedded(p)
    for layer in range(2):
        here = f"layers.{layer}"
        if f"{here}.weight" in p:
            weight, bias = p[f"{here}.weight"], p[f"{here}.bias"]
        else:
            weight, bias = p[f"{here}.1.weight"] @ p[f"{here}.0.weight"], p[f"{here}.1.bias"]
        x = first * (x @ weight.T + bias) + x
    return x


@pytest.mark.parametrize(
    ("make", "reference"),
    [(TabularBottom, embedded), (CrossBottom, crossed), (partial(CrossBottom, rank=2), crossed)],
    ids=["attention", "cross", "low rank"],
)
def test_values_and_gradients_equal_the_equations(
    make: Callable[..., nn.Module], reference: Callable[[Values], NDArray[Any]]
) -> None:
    """Gradients by complex steps: f'(p) = Im f(p + ih) / h, without rounding errors."""
    torch.manual_seed(1)
    bottom: Any = make(INPUTS, embedding_dim=2, attention_units=[3]).double()
    with torch.no_grad():
        for parameter in bottom.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    found = bottom(ROWS)
    assert found.shape == (4, bottom.output_dim) == (4, 10)
    values = {name: p.detach().numpy().astype(complex) for name, p in bottom.named_parameters()}
    assert np.abs(found.detach().numpy() - reference(values)).max() < 1e-10
    factors = torch.linspace(-1, 1, 40, dtype=torch.float64).view(4, 10)
    (found * factors).sum().backward()
    for name, parameter in bottom.named_parameters():
        for place in np.ndindex(parameter.shape):
            values[name][place] += 1e-30j
            slope = (reference(values) * factors.numpy()).sum().imag / 1e-30
            values[name][place] = values[name][place].real
            assert abs(slope - float(parameter.grad[place])) < 1e-10 * max(1, abs(slope)), (name, place)
    assert bottom.embeddings[0].weight.grad[0].tolist() == [0, 0]  # padding


def test_numbers_of_tables_equal_their_equations() -> None:
    """x / sqrt(1 + (x / 3)^2) for numbers with edges, and with ``number_dim`` W p(x) + v x + b (arXiv 2203.05556)."""
    torch.manual_seed(0)
    x = torch.tensor([[-9.0, 0.0, 1.0, 0.3], [0.5, 1.0, 0.0, 9.0], [1.4, 0.0, 0.0, -1.0]], dtype=torch.float64)
    edges = [[-1.0, 0.0, 2.0], [], [], [-0.5, 0.5]]  # column 1 marks the gaps of column 0; column 2 has no edges
    inputs = {"n": Numeric(4, edges=tuple(map(tuple, edges)))}
    soft = x.numpy() / np.sqrt(1 + (x.numpy() / 3) ** 2)
    plain = np.stack([soft[:, 0], x[:, 1], x[:, 2], soft[:, 3]], 1)
    assert np.allclose(TabularBottom(inputs)({"n": x}), plain)
    bottom: Any = TabularBottom(inputs, number_dim=2).double()
    weight = torch.randn_like(bottom.numbers[0].weight)
    bottom.numbers[0].weight.data = weight
    slope, bias = (getattr(bottom.numbers[0], name).detach().numpy() for name in ("slope", "bias"))
    for row, values in enumerate(bottom({"n": x}).detach().numpy()):
        expected = [plain[row]]
        for place, column in enumerate((0, 3)):
            p = [np.clip((float(x[row, column]) - low) / (high - low), 0, 1) for low, high in pairwise(edges[column])]
            missing = column == 0 and bool(x[row, 1])
            binned = sum(part * weight[place, bin].numpy() * (not missing) for bin, part in enumerate(p))
            expected.append(binned + soft[row, column] * slope[place] + bias[place])
        assert np.allclose(values, np.concatenate(expected))
    assert bottom.output_dim == 8


def test_more_padding_changes_nothing() -> None:
    bottom = TabularBottom(INPUTS, 4)
    longer = ROWS | {"seen": nn.functional.pad(ROWS["seen"], (0, 5))}
    torch.testing.assert_close(bottom(longer), bottom(ROWS))


BAGS: dict[str, InputSpec] = {"bits": Bag(6, 4), "x": Numeric(1)}
BITS = torch.tensor([[2, 4, 0, 0], [5, 3, 2, 4], [0, 0, 0, 0], [1, 2, 1, 0]])  # 1: not in the training rows


@pytest.mark.parametrize("pooling", ["sum", "sqrtn"])
def test_a_sum_of_a_list_is_a_dense_layer(pooling: str) -> None:
    torch.manual_seed(0)
    bottom: Any = TabularBottom(BAGS, 2, list_pooling=pooling, list_dim=7, list_dropout=0.5).eval()
    nn.init.normal_(bottom.bags[0].bias)
    vectors = nn.functional.one_hot(BITS, 6)[..., 2:].sum(1).float()
    vectors = vectors / (vectors.sum(1, keepdim=True).clamp(min=1).sqrt() if pooling == "sqrtn" else 1)
    expected = torch.relu(vectors @ bottom.embeddings[0].weight[2:] + bottom.bags[0].bias)
    outputs = bottom({"bits": BITS, "x": torch.zeros(4, 1)})
    torch.testing.assert_close(outputs, torch.cat([expected, torch.zeros(4, 1)], 1))
    assert outputs.shape[1] == bottom.output_dim == 8


@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_dropout_leaves_out_elements_and_keeps_the_mean(pooling: str) -> None:
    torch.manual_seed(0)
    bottom: Any = TabularBottom({"bits": Bag(6, 4)}, 5, list_pooling=pooling, list_dropout=0.25)
    nn.init.eye_(bottom.embeddings[0].weight)
    outputs = bottom({"bits": torch.tensor([[2, 3, 4, 0]]).expand(4000, 4)})
    assert set(outputs.unique().tolist()) == (
        {0, 1, 0.5, torch.tensor(1 / 3).item()} if pooling == "mean" else {0, torch.tensor(4 / 3).item()}
    )
    expected = (1 - 0.25**3) / 3 if pooling == "mean" else 1.0
    torch.testing.assert_close(outputs.mean(0), torch.tensor([0, 0, *[expected] * 3]), atol=0.03, rtol=0)


def test_sums_need_a_list() -> None:
    for option in ({"list_pooling": "sum"}, {"list_dim": 7}, {"list_dropout": 0.5}):
        with pytest.raises(
            InputError, match="list_pooling, list_dim, list_dropout: no input is a list without a target"
        ):
            TabularBottom({"item": Categorical(4), "seen": Bag(5, 3, "item")}, **option)
    assert check.options(build_bottom) == check.options(TabularBottom)


def test_crosses_need_vectors() -> None:
    with pytest.raises(InputError, match="'photo' is Image"):
        CrossBottom({"photo": Image(1, 8, 8)})


@pytest.mark.parametrize("network", ["mmoe", "ple", "shared_bottom", "single_task"])
def test_networks_on_texts_start_with_the_encoder(network: str) -> None:
    """The state of the first token, without a Transformer's experts; tasks alone have encoders of their own."""
    words = ["data=glue", f"network={network}", f"bottom.config={{hidden_size: {transformers.CONFIG['hidden_size']}}}"]
    built: Any = build.build_network(composed(words), transformers.SPEC).eval()
    rows = transformers.tokens()
    predictions = built(rows).predictions
    assert {name: list(value.shape) for name, value in predictions.items()} == {"a": [4], "b.c": [4, 3], "type": [4]}
    predictions["a"].sum().backward()
    encoders = [module for module in built.modules() if isinstance(module, TextBottom)]
    trained = [encoder.encoder.embeddings.word_embeddings.weight.grad is not None for encoder in encoders]
    assert trained == ([True, False, False] if network == "single_task" else [True])
    dense = transformers.transformer(nn.Identity, mixture_layers=[], config={"hidden_size": 16}).float().eval()
    dense.load_state_dict(encoders[0].encoder.state_dict(), strict=False)
    states, packing, _ = dense.encode(rows, [])
    torch.testing.assert_close(encoders[0](rows), states[-1][packing.first])


def test_marked_words_need_a_transformer() -> None:
    tasks = [TaskSpec("wic", "binary", marked=True)]
    with pytest.raises(InputError, match=r"task wic: of the networks, only transformer has .* with marked words"):
        build.build_network(composed(["data=glue", "network=mmoe"]), DataSpec(transformers.SPEC.inputs, tasks))
