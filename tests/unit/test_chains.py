"""Chains of tasks: the product against a hand-made case, its extremes, labels, predictions by name, AITM, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.nn.functional as F
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.chain_labels import find_filled_tasks

import mtl
from mtl.chains import joint_logits
from mtl.checks import InputError
from mtl.networks.aitm import AITM
from mtl.networks.heads import Heads
from mtl.predictions import readable
from mtl.training.evaluation import Evaluation
from mtl.training.losses import task_loss_sums
from mtl.types import TaskSpec
from mtl.use import program
from mtl.use.serve import Predictor

NAN = math.nan
CLICK = TaskSpec("click", "binary")
CART = TaskSpec("cart", "binary", after="click", metrics=("logloss", "accuracy"))
BOUGHT = TaskSpec("bought", "binary", after="cart")
CHAIN = {task.name: task for task in (BOUGHT, CLICK, CART)}  # in any order
LOGITS = {"click": [0.5, -1.0, 2.0], "cart": [1.0, 0.0, -2.0], "bought": [-1.0, 3.0, 0.3]}


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def predictions(**other: Any) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in (LOGITS | other).items()}


def test_losses_and_metrics_are_of_the_product() -> None:
    products = [sigmoid(a) * sigmoid(b) * sigmoid(c) for a, b, c in zip(*LOGITS.values(), strict=True)]
    targets = {"click": [1.0, 0.0, NAN], "cart": [1.0, 0.0, 1.0], "bought": [1.0, NAN, 0.0]}
    given = joint_logits(CHAIN, predictions())
    names, totals, counts = task_loss_sums(CHAIN, given, {n: torch.tensor(t) for n, t in targets.items()})
    found = dict(zip(names, zip(totals.tolist(), counts.tolist(), strict=True), strict=True))
    assert found["bought"] == (pytest.approx(-math.log(products[0]) - math.log(1 - products[2])), 2)
    assert found["click"][0] == pytest.approx(-math.log(sigmoid(0.5)) - math.log(1 - sigmoid(-1)))
    evaluation = Evaluation([*CHAIN.values()])
    evaluation.update(predictions(), {name: torch.tensor(values) for name, values in targets.items()})
    cart = [sigmoid(0.5) * sigmoid(1), sigmoid(-1) * 0.5, sigmoid(2) * sigmoid(-2)]
    expected = -(math.log(cart[0]) + math.log(1 - cart[1]) + math.log(cart[2])) / 3
    assert evaluation.compute()["cart/logloss"] == pytest.approx(expected)
    values = readable(CHAIN, predictions())
    assert values["bought"].tolist() == pytest.approx(products)
    assert values["bought_given_cart"].tolist() == pytest.approx([sigmoid(z) for z in LOGITS["bought"]])
    assert list(values) == ["click", "cart", "cart_given_click", "bought", "bought_given_cart"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_product_is_exact_at_its_extremes(dtype: torch.dtype) -> None:
    """Also where the probability rounds to 0 or 1: the loss is the sum of the two logarithms, the gradient finite."""
    ends = [-1000.0, -90.0, -20.0, 0.0, 20.0, 90.0, 1000.0]
    pairs = torch.cartesian_prod(torch.tensor(ends), torch.tensor(ends)).to(dtype)
    click, cart = (z.clone().requires_grad_() for z in pairs.unbind(1))
    joint = joint_logits(CHAIN, {"click": click, "cart": cart})["cart"]
    assert joint.isfinite().all()
    a, b = (z.detach().double() for z in (click, cart))
    log_p = F.logsigmoid(a) + F.logsigmoid(b)
    torch.testing.assert_close(F.logsigmoid(joint).double(), log_p, rtol=1e-6, atol=1e-30)
    for label in (0.0, 1.0):
        loss = F.binary_cross_entropy_with_logits(joint, torch.full_like(joint, label), reduction="sum")
        for gradient in torch.autograd.grad(loss, (click, cart), retain_graph=True):
            assert gradient.isfinite().all()
            assert (gradient.abs() <= 1.001).all()


ROWS = pl.DataFrame({"x": [row + 0.5 for row in range(40)], "click": [row % 2 for row in range(40)]})
ROWS = ROWS.with_columns(cart=pl.col("click") * (pl.int_range(40) % 3 == 0))
TASKS: dict[str, Any] = {"click": "binary", "cart": {"kind": "binary", "after": "click"}}


def targets(frame: pl.DataFrame, folder: Path, tasks: Any = TASKS) -> dict[str, torch.Tensor]:
    frame.write_parquet(folder / "t.parquet")
    path = str(folder / "t.parquet")
    data = TableDataModule(path, tasks, batch_size=8, split={"fractions": [1, 0, 0]}, val_path=path, test_path=path)
    data.setup()
    return data.splits["val"].targets


def test_labels_of_a_chain(tmp_path: Path) -> None:
    expected = torch.tensor(ROWS["cart"].to_list()).float()
    assert torch.equal(targets(ROWS, tmp_path)["cart"], expected)
    no = pl.when(pl.col("click") == 1).then("cart")
    assert torch.equal(targets(ROWS.with_columns(cart=no), tmp_path)["cart"], expected)  # filled for clicks alone
    some = targets(ROWS.with_columns(cart=pl.when(pl.int_range(40) > 9).then("cart")), tmp_path)["cart"]
    assert some[:10].isnan().all()  # missing, with or without a click
    assert torch.equal(some[10:], expected[10:])
    wrong = ROWS.with_columns(cart=pl.when(pl.int_range(40) == 6).then(1).otherwise("cart"))
    with pytest.raises(InputError, match=r"column 'cart', row 7: 1: a row cannot have cart without click.* 'click'"):
        targets(wrong, tmp_path)


@pytest.mark.parametrize("last", [0, None])
def test_labels_of_a_chain_do_not_depend_on_the_rows_beside_them(last: int | None, tmp_path: Path) -> None:
    """One training row without a click, the last, decides what the empty cells of all rows without a click mean.

    Blocks of 1, 7 and all rows, streams with windows of other sizes, and a restored state have the same labels.
    """
    rows = pl.concat([ROWS] * 10).with_columns(x=pl.int_range(400) + 0.5, part=pl.lit("train"))
    rows = rows.with_columns(
        cart=pl.when(pl.int_range(400) == 398).then(last).otherwise(pl.when(click=1).then("cart")),
        bought=pl.when(pl.col("cart") == 1).then((pl.int_range(400) % 5 > 2).cast(int)),
    )
    held_out = rows[:100].with_columns(part=pl.Series(["val", "test"] * 50))
    tasks = TASKS | {"bought": {"kind": "binary", "after": "cart"}}
    pl.concat([rows, held_out]).write_parquet(tmp_path / "t.parquet")
    options = {"tasks": tasks, "split": {"by": "column", "column": "part"}, "batch_size": 64, "eval_batch_size": 64}
    memory = TableDataModule(tmp_path / "t.parquet", **options)
    memory.setup()
    names, expected = list(tasks), memory.splits["train"].targets
    never = expected["click"] == 0
    assert int(expected["cart"][never].isnan().sum()) == (0 if last is None else 199)
    assert expected["bought"].isnan().equal(expected["cart"].isnan())
    for size in (1, 7, len(rows)):  # of a tenth of the rows, which has the last one
        blocks = [(block, "t") for block in rows[360:].iter_slices(size)]
        found = find_filled_tasks(memory.labels, memory.spec.tasks, lambda _, blocks=blocks: iter(blocks))
        assert found == memory.row_encoder.filled_after
    for window in (256, 1 << 20):
        stream = TableDataModule(tmp_path / "t.parquet", window_rows=window, **options)
        stream.setup()
        batches = [*stream.train_dataloader()]
        counts = {name: sum(int((~b.targets[name].isnan()).sum()) for b in batches) for name in names}
        assert counts == {name: int((~expected[name].isnan()).sum()) for name in names}
    restored = TableDataModule(tmp_path / "t.parquet", **options)
    restored.load_state_dict(memory.state_dict())
    for row in (0, 1, 7, 398):
        one = restored.labelled(rows[row : row + 1], "rows").targets
        assert all(one[name].allclose(expected[name][row], equal_nan=True) for name in names)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"cart": {"kind": "binary", "after": "clik"}}, "data.tasks.cart: after=clik: there is no task clik"),
        ({"click": {"kind": "binary", "after": "cart"}}, "after=cart: click after cart after click is a circle"),
        ({"click": {"kind": "binary", "after": "click"}}, "click after click is a circle"),
        ({"cart": {"kind": "regression", "after": "click"}}, "only binary tasks form chains, and cart is regression"),
        ({"click": "regression"}, "data.tasks.cart: after=click: click is not binary but regression"),
    ],
)
def test_chains_that_lead_nowhere_are_refused(tasks: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TableDataModule("nowhere.csv", TASKS | tasks, batch_size=8)


def test_aitm_is_the_paper_s_attention() -> None:
    """For a chain of two, written out: p = relu(W z + b), weights softmax(<h2 u, h3 u> / sqrt(H)), sum of w h1(u)."""
    torch.manual_seed(0)
    tasks = [TaskSpec("cart", "binary", after="click"), TaskSpec("minutes", "regression"), CLICK]
    heads, x = AITM(tasks, 4, units=[3]).eval(), torch.randn(5, 3, 4)
    plain = Heads(tasks, 4, units=[3]).eval()
    plain.load_state_dict(heads.state_dict(), strict=False)
    found, without = heads(x, [0, 1, 2]), plain(x, [0, 1, 2])
    assert torch.equal(found["click"], without["click"])
    assert torch.equal(found["minutes"], without["minutes"])
    features, [transfer] = Heads.features(heads, x, [0, 1, 2]), heads.transfers
    both = [transfer.passed(features[:, 2]), features[:, 0]]
    scores = torch.stack([(transfer.key(u) * transfer.query(u)).sum(1) / math.sqrt(3) for u in both])
    first, second = scores.softmax(0)
    mixed = first[:, None] * transfer.value(both[0]) + second[:, None] * transfer.value(both[1])
    output = heads.output["1"]
    expected = (mixed * output.weight[0].reshape(-1)).sum(1) + output.bias[0].reshape(-1)
    torch.testing.assert_close(found["cart"], expected)
    with pytest.raises(InputError, match="cart needs a prediction of click"):
        heads(x[:, :1], [0])
    with pytest.raises(InputError, match="AITM needs a task after another"):
        AITM([CLICK], 4)


@pytest.mark.usefixtures("few_trees")
def test_predicted_exported_and_served_values_are_equal() -> None:
    rows = pl.concat([ROWS] * 5).with_columns(price=pl.col("x"), x=pl.col("x") % 7)
    price = {"price": {"kind": "regression", "loss": "quantile", "transform": "log"}}
    sizes = {"recipe.expert_units": [8], "recipe.head_units": [8], "heads": "aitm"}
    model = mtl.fit(rows, TASKS | price, gate="softmax", max_epochs=1, options=sizes, progress=False)
    found = model.predict(ROWS)
    names = ["click_class", "click_probability", "cart_class", "cart_probability", "cart_probability_given_click"]
    names += [f"price_quantile_{level}" for level in (0.1, 0.5, 0.9)]
    assert found.columns == names
    joint = (found["click_probability"] * found["cart_probability_given_click"]).to_list()
    assert found["cart_probability"].to_list() == pytest.approx(joint, rel=1e-6)
    assert model.predict(ROWS, ["cart"]).equals(found[names[2:5]])
    assert model.predict(ROWS[:0]).columns == names
    inputs = model.encode(ROWS.with_row_index("\0row", offset=1))
    exported = program.export(program.Readable(program.exportable(model.network)), inputs).module()(inputs)
    for name, column in {"click": names[1], "cart": names[3], "cart_given_click": names[4]}.items():
        assert exported[name].tolist() == pytest.approx(found[column].to_list(), abs=1e-6)
    torch.testing.assert_close(exported["price"], found[names[5:]].to_torch(), rtol=1e-6, atol=0.0)
    with Predictor(model) as predictor:
        served = predictor.submit([{"x": value} for value in ROWS["x"]]).result()
    for name in names[3:]:
        assert [row[name] for row in served] == pytest.approx(found[name].to_list(), rel=1e-6)
