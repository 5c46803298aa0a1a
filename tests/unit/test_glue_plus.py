"""The tasks that MT-TaG adds to GLUE: their layouts, the choices of a question, and marked words."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules.files import glue as glue_files
from mtl.data_modules.files.glue import SOURCES
from mtl.data_modules.glue import GlueDataModule
from mtl.data_modules.text_tasks import TextEncoder
from mtl.data_modules.texts.glue import read_part

from mtl.checks import InputError
from mtl.networks.transformer import mean_states
from mtl.types import TaskSpec
from tests.glue_files import write_glue, write_task
from tests.loaded import loaded

PLUS = ("cb", "copa", "multirc", "boolq", "wic", "imdb", "rt", "yelp", "scitail")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_glue(folder / "glue", dict.fromkeys(PLUS, 32))
    return folder


def module(root: Path, *tasks: str, **options: Any) -> GlueDataModule:
    common = {"batch_size": 4, "eval_batch_size": 8, "download": False, "vocabulary": 100}
    return loaded(GlueDataModule(str(root), tasks=list(tasks), **common | options))


def one_line(root: Path, task: str, entry: dict[str, Any]) -> Any:
    write_task(root, task)
    (root / SOURCES[task].paths("train")[0]).write_text(json.dumps(entry) + "\n")
    return read_part(root, task, "train")


def test_every_task_is_served(root: Path) -> None:
    data = module(root, *PLUS)
    assert {task: len(rows) for task, rows in data.tasks["test"].items()} == {
        **dict.fromkeys(("cb", "boolq", "wic", "imdb", "yelp", "scitail"), 8),
        **dict.fromkeys(("copa", "multirc"), 16),
        "rt": 4,
    }
    for task, rows in data.tasks["train"].items():
        assert len(rows.targets[task].unique()) == (3 if task == "cb" else 2)
        assert len(rows) + len(data.tasks["val"][task]) == {"copa": 64, "multirc": 64}.get(task, 32)
    metrics = {task.name: task.metrics for task in data.spec.tasks}
    assert (metrics["copa"], metrics["multirc"], metrics["cb"]) == (("hit_rate@1",), ("f1",), ("accuracy",))


def test_copa_has_a_row_for_each_choice(tmp_path: Path) -> None:
    entry = {"premise": "It fell.", "choice1": "a", "choice2": "b", "question": "effect", "label": 1, "idx": 0}
    rows = one_line(tmp_path, "copa", entry)
    assert rows.first == ["It fell. What happened as a result?"] * 2
    assert (rows.second, rows.labels.tolist(), rows.groups.tolist()) == (["a", "b"], [0, 1], [1, 1])


def test_multirc_has_a_row_for_each_answer(tmp_path: Path) -> None:
    asked = [{"question": q, "answers": [{"text": q + n, "label": int(n)} for n in "01"]} for q in ("w?", "v?")]
    rows = one_line(tmp_path, "multirc", {"passage": {"text": "P.", "questions": asked}})
    assert rows.first == ["P. w?", "P. w?", "P. v?", "P. v?"]
    assert (rows.second, rows.labels.tolist()) == (["w?0", "w?1", "v?0", "v?1"], [0, 1, 0, 1])
    assert rows.groups.tolist() == [1] * 4


def test_texts_of_reviews(tmp_path: Path) -> None:
    (tmp_path / "yelp_review_polarity_csv").mkdir()
    (tmp_path / SOURCES["yelp"].paths("train")[0]).write_text('"1","bad,\\nhe said \\""no\\"""\n"2","good"\n')
    yelp = read_part(tmp_path, "yelp", "train")
    assert (yelp.first, yelp.labels.tolist()) == (['bad, he said "no"', "good"], [0, 1])
    folder = tmp_path / "rt-polaritydata"
    folder.mkdir()
    for name in ("neg", "pos"):
        (folder / f"rt-polarity.{name}").write_bytes(
            "".join(f"{name} \xe9 {n} \n" for n in range(10)).encode("latin-1")
        )
    train, dev = (read_part(tmp_path, "rt", part) for part in ("train", "dev"))
    assert train.first == [f"{name} \xe9 {n}" for name in ("neg", "pos") for n in range(8)]
    assert (dev.first, dev.labels.tolist()) == (["neg \xe9 8", "pos \xe9 8"], [0, 1])


def test_choices_of_a_question_stay_together(root: Path) -> None:
    data = module(root, "copa", max_rows={"copa": 21})
    assert [len(data.tasks[split]["copa"]) for split in ("train", "val", "test")] == [18, 2, 16]
    for split in ("train", "val", "test"):
        rows = data.tasks[split]["copa"]
        assert set(rows.groups.bincount().tolist()) == {0, 2}
    batch = next(iter(data.val_dataloader()))
    assert batch.groups.tolist() == [batch.groups[0]] * 2


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("cb", '{"premise": "a"'),
        ("cb", '{"premise": "a", "hypothesis": "b", "label": "yes"}'),
        ("copa", '{"premise": "a", "question": "why"}'),
        ("yelp", '"3","text"'),
    ],
)
def test_damaged_files(task: str, line: str, tmp_path: Path) -> None:
    write_task(tmp_path, task)
    file = tmp_path / SOURCES[task].paths("train")[0]
    file.write_text(line + "\n")
    with pytest.raises(InputError, match=rf"{file} is damaged \(.*\)\. Repair"):
        read_part(tmp_path, task, "train")


def test_damaged_archive_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rt-polarity\.neg is missing: get rt-polaritydata\.tar\.gz from http.*glue$"):
        glue_files.prepare(tmp_path / "glue", "rt", download=True)
    with pytest.raises(InputError, match=r"WiC\.zip is missing and data\.download=false.*v2/WiC\.zip"):
        glue_files.prepare(tmp_path / "glue", "wic", download=False)
    (tmp_path / "glue").mkdir()
    (tmp_path / "glue" / "aclImdb_v1.tar.gz").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"aclImdb_v1\.tar\.gz is damaged"):
        read_part(tmp_path / "glue", "imdb", "train")


def test_marked_words_become_tokens(tmp_path: Path) -> None:
    entry = {"word": "run", "sentence1": "to Run it", "sentence2": "a run", "label": True}
    entry |= {"start1": 3, "end1": 6, "start2": 2, "end2": 5}
    write_glue(tmp_path / "glue", {"wic": 20})
    data = module(tmp_path, "wic")
    rows = data.encoder.encode(one_line(tmp_path / "other", "wic", entry), 128)
    pieces = [data.encoder.tokenizer.id_to_token(token) for token in rows["tokens"].tolist()]
    for first, last in rows["marks"][0].tolist():
        assert "".join(pieces[first : last + 1]).replace("##", "").replace("[UNK]", "run") == "run"
    assert rows["marks"][0, 0, 0] < rows["boundary"][0] <= rows["marks"][0, 1, 0]
    # A user's rows mark the words in the text
    encoder = TextEncoder.from_state(data.row_encoder.state())
    columns = SOURCES["wic"].texts
    same = encoder.encode(pl.DataFrame([["to [[Run]] it"], ["a [[run]]"]], schema=columns), "here", "wic")
    assert torch.equal(same["marks"], rows["marks"])
    assert torch.equal(same["tokens"][0].int(), rows["tokens"])
    for text in ("no mark", "[[two]] of [[them]]"):
        with pytest.raises(InputError, match="here, row 1: each text must mark one word"):
            encoder.encode(pl.DataFrame([[text], ["a [[run]]"]], schema=columns), "here", "wic")
    late = entry | {"sentence1": "it " * 9 + "Run", "start1": 27, "end1": 30}
    with pytest.raises(InputError, match="max_length=8 cuts off the marked word"):
        data.encoder.encode(one_line(tmp_path / "other", "wic", late), 8)


def test_mean_states_of_marked_words() -> None:
    states = torch.arange(24.0).view(2, 4, 3)
    marks = torch.tensor([[[0, 0], [1, 2]], [[3, 3], [0, 1]]])
    expected = torch.stack(
        [
            torch.stack([states[0, 0], (states[0, 1] + states[0, 2]) / 2]),
            torch.stack([states[1, 3], (states[1, 0] + states[1, 1]) / 2]),
        ]
    )
    assert torch.equal(mean_states(states, marks), expected)
    assert mean_states(states[:0, :1], marks[:0]).shape == (0, 2, 3)
    assert TaskSpec("wic", "binary", marked=True).marked


def test_lengths_of_single_tasks(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = module(root, "cb", "boolq", max_length=8, max_lengths={"boolq": 20, "mnli": 512})
    longest = {task: int(rows.lengths.max()) for task, rows in data.tasks["train"].items()}
    assert longest["cb"] == 8 < longest["boolq"] <= 20
    assert data.spec.inputs["tokens"].length == 20
    assert TextEncoder.from_state(data.row_encoder.state()).max_length == {"cb": 8, "boolq": 20}
    assert "CB/val.jsonl has 8 rows instead of 56" in caplog.text
