"""SQuAD 2.0: its files, splits and downloads, and the rows of long texts."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules.files import squad as squad_files
from mtl.data_modules.files.squad import SOURCES

from mtl.checks import InputError
from mtl.types import MISSING_CLASS
from tests.file_server import serving
from tests.squad_files import (
    ARTICLES,
    LONG,
    QUESTIONS,
    RIVER,
    evaluated,
    module,
    paragraph,
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
        assert batch.inputs["row"].tolist() == [row]
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


def test_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    articles = [((RIVER, (f"where is {number}", "Zürich"), (f"who is {number}",)),) for number in range(20)]
    write_squad(tmp_path / "squad", squad(*articles), squad(*ARTICLES))
    with caplog.at_level(logging.WARNING):
        data, other = (module(tmp_path, published_split=False, max_length=128, seed=seed) for seed in (0, 1))
    assert "train-v2.0.json has 40 questions instead of 130319; dev-v2.0.json has 8 questions" in caplog.text
    parts, others = data._read(), other._read()
    assert [len(part) for part in parts] == [36, 4, QUESTIONS]
    assert len({question.article for question in parts[1]}) == 2
    assert not {question.article for question in parts[0]} & {question.article for question in parts[1]}
    assert {question.article for question in others[1]} != {question.article for question in parts[1]}
    assert [len(data.tasks[split]["squad"]) for split in ("train", "val")] == [36, 4]
    few = module(tmp_path, published_split=False, max_length=128, max_rows=12)
    assert sum(len(few.tasks[split]["squad"]) for split in ("train", "val")) == 12
    rows = torch.cat([data.tasks[split]["squad"].inputs["row"] for split in ("train", "val", "test")])
    assert rows.tolist() == list(range(len(rows)))
    write_squad(tmp_path / "squad", squad(articles[0]))
    with pytest.raises(InputError, match="validation needs some of the articles, but the 2 questions are of only one"):
        module(tmp_path, published_split=False)


def damaged(**changes: Any) -> dict[str, Any]:
    """Return a file of one question ``q`` with ``changes``; a change to ... removes the key."""
    part = paragraph("q", RIVER, ("where", "Lake Zürich"))
    part["qas"][0] = {key: value for key, value in (part["qas"][0] | changes).items() if value is not ...}
    return {"data": [{"paragraphs": [part]}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [', r"is not a JSON file \(Expecting value: line 1 column 11"),
        ("[" * 100_000, "is not a JSON file"),
        (b'{"data": "\xff"}', "is not a JSON file .*utf-8"),
        ([], r"is '\[\]': must be a mapping with 'data'"),
        ({"version": 1}, "has no 'data'; delete the file to have it fetched again"),
        ({"data": []}, "has no questions"),
        ({"data": [{"paragraphs": 3}]}, r"article 1: 'paragraphs' is '3': must be a list"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, r"article 1, a paragraph has no 'context'"),
        (damaged(id=7), r"article 1, a question: 'id' is '7': must be a text"),
        (damaged(question=...), r"question 'q-0' has no 'question'"),
        (damaged(answers=[{"text": "Lake"}]), r"question 'q-0' has no 'answer_start'"),
        (
            damaged(answers=[{"text": "Lake", "answer_start": True}]),
            r"question 'q-0': 'answer_start' is 'True': must be a wh",
        ),
        (
            damaged(answers=[{"text": "Lake", "answer_start": 3}]),
            r"question 'q-0': an answer is not at its answer_start",
        ),
        (damaged(answers=[{"text": "", "answer_start": -1}]), r"so it is in 1 of 1 questions"),
    ],
)
def test_damaged_files_name_the_question(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "dev-v2.0.json"
    raw = content if isinstance(content, bytes | str) else json.dumps(content)
    file.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    with pytest.raises(InputError, match=message) as caught:
        squad_files.read(file)
    assert str(file) in str(caught.value)


def test_few_misplaced_answers_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = squad(((RIVER, *[(f"where is {number}", "Zürich") for number in range(200)]),))
    content["data"][0]["paragraphs"][0]["qas"][7]["answers"][0]["answer_start"] += 1
    write_squad(tmp_path, content)
    with caplog.at_level(logging.WARNING):
        assert len(squad_files.read(tmp_path / "train-v2.0.json")) == 199
    assert "question '0-0-7': an answer is not at its answer_start in the context; 1 of 200 questions" in caplog.text


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the files as on their site, with their checksums expected."""
    write_squad(tmp_path / "site")
    for stem, source in SOURCES.items():
        digest = hashlib.sha256((tmp_path / "site" / source.name).read_bytes()).hexdigest()
        monkeypatch.setitem(SOURCES, stem, replace(source, sha256=digest))
    with serving(tmp_path / "site") as url:
        yield url


def test_missing_files_are_fetched(tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "data"
    message = r"train-v2\.0\.json is missing and data\.download=false: set it to true, or put the official train-v2"
    with pytest.raises(InputError, match=message):
        module(root)
    data = module(root, download=True, base_url=site)
    assert data.tasks["train"]["squad"].targets["squad"].shape == (len(data.tasks["train"]["squad"]), 2)
    names = [source.name for source in SOURCES.values()]
    assert all((root / "squad" / name).read_bytes() == (tmp_path / "site" / name).read_bytes() for name in names)
    module(root, download=True, base_url="http://127.0.0.1:9")  # all is there
    (root / "squad" / names[1]).unlink()
    monkeypatch.setitem(SOURCES, "dev", replace(SOURCES["dev"], sha256="0" * 64))
    with pytest.raises(InputError, match=r"cannot download dev-v2\.0\.json from .*sha256 is .*put the official dev-v2"):
        module(root, download=True, base_url=site)
    assert not (root / "squad" / names[1]).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 21}, r"data\.stride=21: of max_length=32 tokens, max_question=8 and 4 special tokens leave 20"),
        ({"max_rows": 1}, r"data\.max_rows=1: must be a whole number from 2"),
        ({"max_answer": 0}, r"data\.max_answer=0: must be"),
        ({"base_url": "here"}, r"data\.base_url=here: must be an address"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        module(tmp_path, **options)


# Losses and networks
