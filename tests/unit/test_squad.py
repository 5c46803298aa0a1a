"""SQuAD 2.0: its files, splits and downloads, and the rows of long texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules.squad import read_questions

from mtl.checks import InputError
from mtl.types import MISSING_CLASS
from tests.squad_files import (
    ARTICLES,
    LONG,
    QUESTIONS,
    RIVER,
    evaluated,
    module,
    squad,
    windows_of,
    windows_of_split,
    write_squad,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_squad(folder / "squad")
    return folder


def test_rows_and_targets(root: Path) -> None:
    """Each row has its question and its part of the text; targets mark the answer where it is whole in the row."""
    data = module(root)
    scorer: Any = data.spec.tasks[0].scorer
    windows, encoder = windows_of(data), data.encoder
    rows, low = data.tasks["test"]["squad"], windows_of_split(data)
    assert rows is data.tasks["val"]["squad"]
    assert int(rows.lengths.max()) <= 32
    several, spans = 0, set()
    for index in range(len(rows)):
        row, batch = low + index, rows.select(torch.tensor([index]))
        question, (first, last) = int(windows.question[row]), windows.context[row].tolist()
        ids, text, gold = batch.inputs["tokens"][0], scorer.texts[question], scorer.golds[question]
        assert batch.row_ids is not None
        assert batch.row_ids.tolist() == [row]
        assert int(ids[0]) == encoder.tokenizer.token_to_id("[CLS]")
        assert int(ids[first - 1]) == int(ids[last + 1]) == encoder.tokenizer.token_to_id("[SEP]")
        assert last + 2 == len(ids)
        assert batch.inputs["segments"][0].tolist() == [0] * first + [1] * (last + 2 - first)
        place = int(windows.shift[row] + first - windows.sizes[: windows.asked[question]].sum())
        whole = encoder.tokenizer.encode(text, add_special_tokens=False).ids
        assert whole[place : place + last - first + 1] == ids[first : last + 1].tolist()
        start, stop = batch.targets["squad"][0].tolist()
        if stop:
            places = windows.characters[windows.shift[row] + torch.tensor([start, stop])]
            assert text[int(places[0, 0]) : int(places[1, 1])] == gold[0]
            spans.add(gold[0])
        else:
            assert start == 0
            several += bool(gold)
    assert spans == {"Lake Zürich", "cafés", "Gustave Eiffel", "東京", "a church", "the Aare"}
    assert several > 3  # rows without the answer to a question that has one
    assert rows.targets["squad"].dtype == torch.int64


def test_rows_of_a_long_text_overlap_and_cover_it(root: Path) -> None:
    data = module(root)
    windows = windows_of(data)
    scorer: Any = data.spec.tasks[0].scorer
    question = next(i for i, text in enumerate(scorer.texts) if text.startswith(LONG))
    rows = (windows.question == question).nonzero()[:, 0]
    begins, ends = (windows.context[rows] + windows.shift[rows, None]).unbind(1)
    assert begins.diff().tolist() == [10] * (len(rows) - 1)
    assert (begins[1:] < ends[:-1]).all()
    size, start = int(windows.sizes[windows.asked[question]]), int(begins[0])
    assert int(ends[-1]) - start + 1 == size
    assert int(ends[-2]) - start + 1 < size  # no row more than needed


def test_long_question_is_cut_and_an_answer_without_token_is_missing(tmp_path: Path) -> None:
    question = "where " * 30
    content = squad((("Here it is. Or there.", (question, "Here"), ("what", " "), ("none",)),))
    write_squad(tmp_path / "squad", content, content)
    data = module(tmp_path)
    rows = data.tasks["test"]["squad"]
    assert rows.boundary[0] == 1 + 8 + 1
    assert rows.targets["squad"][1].tolist() == [MISSING_CLASS] * 2
    assert rows.targets["squad"][2].tolist() == [0, 0]
    found = evaluated(data)
    assert found["squad/exact_match"] == 1.0  # the question without a label is scored, too: its answer has no words


def test_splits(tmp_path: Path) -> None:
    articles = [((RIVER, (f"where is {number}", "Zürich"), (f"who is {number}",)),) for number in range(20)]
    write_squad(tmp_path / "squad", squad(*articles), squad(*ARTICLES))
    data, other = (module(tmp_path, published_split=False, max_length=128, seed=seed) for seed in (0, 1))
    parts, others = data._read(), other._read()
    assert [len(part) for part in parts] == [36, 4, QUESTIONS]
    assert len({question.article for question in parts[1]}) == 2
    assert not {question.article for question in parts[0]} & {question.article for question in parts[1]}
    assert {question.article for question in others[1]} != {question.article for question in parts[1]}
    assert [len(data.tasks[split]["squad"]) for split in ("train", "val")] == [36, 4]
    few = module(tmp_path, published_split=False, max_length=128, max_rows=12)
    assert sum(len(few.tasks[split]["squad"]) for split in ("train", "val")) == 12
    rows = torch.cat([data.tasks[split]["squad"].row_ids for split in ("train", "val", "test")])
    assert rows.tolist() == list(range(len(rows)))
    write_squad(tmp_path / "squad", squad(articles[0]))
    with pytest.raises(InputError, match="validation needs some of the training articles; there is only one"):
        module(tmp_path, published_split=False)


def test_misplaced_answers_are_left_out(tmp_path: Path) -> None:
    content = squad(((RIVER, *[(f"where is {number}", "Zürich") for number in range(20)]),))
    content["data"][0]["paragraphs"][0]["qas"][7]["answers"][0]["answer_start"] += 1
    write_squad(tmp_path, content)
    assert len(read_questions(tmp_path / "train-v2.0.json")) == 19
