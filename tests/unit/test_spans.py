"""Tasks that find a span of a text: loss, network, the official scores of SQuAD 2.0, a run that finds the answers."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules.texts.squad_metrics import exact_match, f1, split_answer
from pytorch_lightning import Trainer
from torch import Tensor, nn

from mtl.checks import InputError
from mtl.experts.dense import StackedDense
from mtl.gates import SoftmaxGate
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training import epoch
from mtl.training import evaluation as evaluations
from mtl.training.distillation import prediction_losses
from mtl.training.evaluation import Evaluation, best_spans
from mtl.training.losses import task_loss_sums
from mtl.training.module import MultiTaskModule
from mtl.types import MISSING_CLASS, Batch, DataSpec, Numeric, TaskSpec
from mtl.use.neurons import neuron_scores
from tests.losses import summed_loss
from tests.squad_files import LONG, QUESTIONS, evaluated, module, perfect, windows_of, windows_of_split, write_squad
from tests.transformers import SPEC, tokens, transformer

SPAN = TaskSpec("squad", "span")
LOWEST = torch.finfo(torch.float64).min


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_squad(folder / "squad")
    return folder


def test_normalized_words() -> None:
    assert split_answer("The  Café, an U.S.-based (A) test!\n") == ["café", "usbased", "test"]
    assert split_answer("Theatre — another day") == ["theatre", "—", "another", "day"]
    assert split_answer("the a an . ,") == []


@pytest.mark.parametrize(
    ("answer", "gold", "expected", "exact"),
    [
        ("The cat sat", "a CAT sat!", 1.0, 1.0),
        ("cat sat", "the cat sat down", 2 * 1.0 * (2 / 3) / (1 + 2 / 3), 0.0),
        ("cat cat", "cat", 2 / 3, 0.0),
        ("dog", "cat", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("the", "", 1.0, 1.0),
        ("cat", "", 0.0, 0.0),
        ("", "cat", 0.0, 0.0),
    ],
)
def test_scores_by_hand(answer: str, gold: str, expected: float, exact: float) -> None:
    assert f1(answer, gold) == pytest.approx(expected)
    assert exact_match(answer, gold) == exact


def test_best_span_is_short_in_order_and_inside_the_context() -> None:
    logits = torch.tensor([[1.0, 1.5], [9.0, 9.0], [5.0, 0.0], [0.0, 6.0], [0.0, 7.0], [4.0, 4.0], [9.0, 9.0]])
    context = torch.tensor([[2, 5]])
    for most, span, score in ((1, [5, 5], 8.0), (2, [2, 3], 11.0), (3, [2, 4], 12.0), (30, [2, 4], 12.0)):
        spans, scores, null = best_spans(logits[None], context, most)
        assert (spans.tolist(), scores.tolist(), null.tolist()) == ([span], [score], [2.5])
    reverse = torch.tensor([[[0.0, 0.0], [0.0, 5.0], [5.0, 0.0]]])  # the best start is after the best end
    assert best_spans(reverse, torch.tensor([[1, 2]]), 30)[0].tolist() == [[1, 1]]
    assert best_spans(reverse, torch.tensor([[1, 0]]), 30)[1].tolist() == [-math.inf]  # no context


def test_perfect_logits_give_perfect_scores(root: Path) -> None:
    data = module(root)
    found = evaluated(data)
    assert (found["squad/f1"], found["squad/exact_match"], found["average"]) == (1.0, 1.0, 1.0)
    assert list(found) == ["loss", "average", "squad/loss", "squad/f1", "squad/exact_match"]


def test_no_answer_rule_and_the_best_of_several_answers(root: Path) -> None:
    data = module(root)
    nothing = evaluated(data, lambda batch: torch.zeros(*batch.inputs["tokens"].shape, 2))  # 0 is at least 0
    unanswerable = 2 / QUESTIONS
    assert nothing["squad/f1"] == nothing["squad/exact_match"] == pytest.approx(unanswerable)
    always = evaluated(
        data, lambda batch: perfect(batch) - 20.0 * (torch.arange(len(batch.inputs["tokens"][0])) == 0)[:, None]
    )
    assert always["squad/exact_match"] == pytest.approx(1 - unanswerable)
    scorer: Any = data.spec.tasks[0].scorer
    windows = windows_of(data)
    row = int((windows.question == QUESTIONS).nonzero()[0])  # of the first question of the test file
    assert scorer.golds[QUESTIONS] == ["Lake Zürich", "Zürich"]

    def score(span: list[int]) -> dict[str, float]:
        value = scorer.score(torch.tensor([row]), torch.tensor([span]), torch.tensor([1.0]), torch.tensor([0.0]))
        return dict(value)

    first, last = data.tasks["test"]["squad"].targets["squad"][row - windows_of_split(data)].tolist()
    assert score([first, last]) == score([last, last]) == {"f1": 1.0, "exact_match": 1.0}
    assert score([first, last - 1]) == {"f1": pytest.approx(2 / 3), "exact_match": 0.0}


def test_best_row_of_a_question_counts(root: Path) -> None:
    """The highest score of an answer, and the lowest one of having none."""
    data = module(root)
    scorer: Any = data.spec.tasks[0].scorer
    question = next(i for i, text in enumerate(scorer.texts) if text.startswith(LONG))
    rows = (windows_of(data).question == question).nonzero()[:, 0]
    begins = windows_of(data).context[rows, 0]
    spans = torch.stack([begins, begins], 1)
    scores, nulls = torch.zeros(len(rows)), torch.full((len(rows),), 9.0)
    scores[2], nulls[0] = 5.0, 4.0
    [answer] = scorer.answers(rows, spans, scores, nulls).values()
    start, end = windows_of(data).characters[windows_of(data).shift[rows[2]] + begins[2]].tolist()
    assert answer == scorer.texts[question][start:end] != ""
    backwards = torch.arange(len(rows)).flip(0)
    assert scorer.answers(*(value[backwards] for value in (rows, spans, scores, nulls))) == {question: answer}
    nulls[0] = 5.0
    assert scorer.answers(rows, spans, scores, nulls) == {question: ""}


@pytest.mark.parametrize("cut", [3, 99], ids=["both have rows", "one has none"])
def test_two_processes_report_the_values_of_all_rows(cut: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = module(root)

    def noisy(batch: Batch) -> Tensor:
        assert batch.row_ids is not None
        generators = [torch.Generator().manual_seed(row) for row in batch.row_ids.tolist()]
        noise = torch.stack([torch.randn(64, 2, generator=generator) for generator in generators])
        return perfect(batch) / 4 + noise[:, : batch.inputs["tokens"].shape[1]]

    expected = evaluated(data, noisy)
    assert 0 < expected["squad/exact_match"] < expected["squad/f1"] < 1
    first, second = Evaluation(data.spec.tasks), Evaluation(data.spec.tasks)
    for number, batch in enumerate(data.test_dataloader()):
        evaluation = first if number < cut else second
        evaluation.update({"squad": noisy(batch)}, batch.targets, batch.row_ids)
    more = {(task, name): column for task, name, column in second._labelled_columns()}
    monkeypatch.setattr(epoch, "all_reduce_sum", lambda sums: sums + second.meter.sums)

    def both(rows: dict[Any, Tensor]) -> dict[Any, Tensor]:
        return {name: torch.cat([rows[name], more[name]]) for name in rows} if more else rows

    monkeypatch.setattr(evaluations, "gather_rows", both)
    assert first.compute() == pytest.approx(expected)


def test_evaluation_without_scorer_or_rows_is_one_message(root: Path) -> None:
    with pytest.raises(InputError, match="task 'squad': a task of kind span needs a scorer"):
        Evaluation([SPAN])
    data = module(root)
    batch = next(iter(data.test_dataloader()))
    with pytest.raises(InputError, match="task 'squad': evaluation of a task of kind span needs row_ids"):
        Evaluation(data.spec.tasks).update({"squad": perfect(batch)}, batch.targets)
    others = {"a": torch.zeros(len(batch))}  # rows have no numbers of another task either
    with pytest.raises(InputError, match="task 'squad': evaluation of a task of kind span needs row_ids"):
        Evaluation([TaskSpec("a", "binary"), *data.spec.tasks]).update(
            others | {"squad": perfect(batch)}, others | batch.targets
        )


def test_loss_by_hand() -> None:
    """Half the sum of two cross-entropies; padding adds nothing."""
    logits = torch.tensor(
        [[[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]], [[5.0, 5.0], [1.0, 1.0], [9.0, 9.0]]], dtype=torch.float64
    )
    logits.requires_grad_()
    target = torch.tensor([[1, 2], [MISSING_CLASS] * 2])
    start, end = (math.log(sum(math.exp(x) for x in row)) for row in ((1.0, 2.0, 0.0), (0.0, 0.0, 3.0)))
    total, count = summed_loss(SPAN, logits, target)
    assert (float(total.detach()), int(count)) == (pytest.approx(((start - 2.0) + (end - 3.0)) / 2), 1)
    total.backward()
    assert not logits.grad[1].any()
    padded = torch.cat([logits.detach(), torch.full((2, 2, 2), LOWEST, dtype=torch.float64)], 1)
    torch.testing.assert_close(summed_loss(SPAN, padded, target)[0], total.detach())
    other = TaskSpec("other", "span")
    predictions, targets = {"squad": padded, "other": logits[:, :2]}, {"squad": target, "other": target.clamp(max=1)}
    names, totals, counts = task_loss_sums({"squad": SPAN, "other": other}, predictions, targets)
    assert (names, counts.tolist()) == (["squad", "other"], [1, 1])
    torch.testing.assert_close(totals[0], total)
    empty = summed_loss(SPAN, torch.zeros(0, 1, 2), torch.zeros(0, 2, dtype=torch.int64))
    assert [float(value) for value in empty] == [0.0, 0.0]


def test_distillation_compares_positions() -> None:
    student, teacher = torch.randn(3, 4, 2, dtype=torch.float64), torch.randn(3, 4, 2, dtype=torch.float64)
    classes = TaskSpec("c", "multiclass", 4)
    each = [prediction_losses(classes, student[..., end], teacher[..., end]) for end in (0, 1)]
    expected = torch.stack(each).mean(0)
    torch.testing.assert_close(prediction_losses(SPAN, student, teacher), expected)
    padding = torch.full((3, 2, 2), LOWEST, dtype=torch.float64)
    padded = torch.cat([student, padding], 1).requires_grad_()
    found = prediction_losses(SPAN, padded, torch.cat([teacher, padding], 1))
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert padded.grad.isfinite().all()
    assert not padded.grad[:, 4:].any()


@pytest.mark.parametrize("layers", [None, []], ids=["mixture", "dense"])
def test_network_predicts_each_token(layers: list[int] | None) -> None:
    spec = DataSpec(SPEC.inputs, [*SPEC.tasks, SPAN])
    network = transformer(SoftmaxGate, spec=spec, mixture_layers=layers).eval()
    head: Any = network.heads["task_squad"]
    weight, bias = head.output["2"].weight, head.output["2"].bias
    assert sum(parameter.numel() for parameter in head.parameters()) == 16 * 2 + 2
    assert 0.01 < float(weight.detach().std()) < 0.03
    nn.init.normal_(bias)
    inputs = tokens([9, 4, 1])
    output = network(inputs, ["a", "squad"])
    logits, real = output.predictions["squad"], inputs["tokens"] != 0
    assert logits.shape == (3, 9, 2)
    torch.testing.assert_close(logits[real], output.hidden[-1] @ weight[0].T + bias[0])
    assert not logits.softmax(1)[~real].any()
    assert output.predictions["a"].shape == (3,)
    more = network(tokens([9, 4, 1], padded=3), ["squad"]).predictions["squad"]
    torch.testing.assert_close(more[:, :9], logits)
    target = torch.tensor([[2, 4], [0, 0], [0, 0]])
    torch.testing.assert_close(summed_loss(SPAN, more, target), summed_loss(SPAN, logits, target))
    empty = {"tokens": torch.zeros(0, 1, dtype=torch.int64), "segments": torch.zeros(0, 1, dtype=torch.int64)}
    assert network(empty, ["squad"]).predictions["squad"].shape == (0, 1, 2)
    if layers == []:
        batch = Batch(tokens([9, 4, 1]), {"squad": target})
        scores = neuron_scores(network, {"squad": SPAN}, [batch])
        assert scores.shape == (2, 64)
        assert bool((scores > 0).any())


def test_other_networks_refuse_spans() -> None:
    with pytest.raises(InputError, match="task squad: of the networks, only transformer has tasks of kind span"):
        Heads([TaskSpec("a", "binary"), SPAN], 4)
    spec = DataSpec({"x": Numeric(4)}, [SPAN])

    def bottom(inputs: Any) -> nn.Module:
        linear = nn.Identity()
        linear.output_dim = 4
        return linear

    with pytest.raises(InputError, match="only transformer has tasks of kind span"):
        MMoE(spec, 2, bottom, partial(StackedDense, units=[4]), SoftmaxGate, Heads)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*")
def test_training_finds_the_answers(root: Path, tmp_path: Path) -> None:
    """The questions of both files are the same; the checkpoint has no texts."""
    data = module(root, batch_size=8, max_length=64, stride=40)
    assert len(data.tasks["train"]["squad"]) > QUESTIONS  # some texts give several rows
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    network = transformer(SoftmaxGate, spec=data.spec, config=config, num_experts=2).float()
    training = MultiTaskModule(network, data.spec.tasks, partial(torch.optim.Adam, lr=3e-3))
    trainer = Trainer(
        max_epochs=60,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=60,
    )
    trainer.fit(training, data)
    assert float(trainer.callback_metrics["val/squad/f1"]) > 0.9
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    content = (tmp_path / "last.ckpt").read_bytes()
    assert b"squad" in content
    assert b"Limmat" not in content
