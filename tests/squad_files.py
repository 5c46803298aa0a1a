"""Write small files in SQuAD 2.0's official format, and evaluate answers to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from mtl.data_modules.squad import FILES, SquadDataModule
from mtl.data_modules.texts.squad_windows import Windows
from torch import Tensor

from mtl.training.evaluation import Evaluation
from mtl.types import Batch
from tests.loaded import loaded

RIVER = "Limmat is a river; it flows from Lake Zürich through the city of Zürich, past cafés, to the Aare."
TOWER = "The tower was built in 1889 by Gustave Eiffel. 東京 has one that looks like it 😀; the one in Paris is older."
LONG = " ".join(
    f"In year {year} the village had {year % 7 + 2} wells and {year % 5 + 3} barns." for year in range(1, 13)
)
ARTICLES = (
    (
        (
            RIVER,
            ("where does the river begin", "Lake Zürich", "Zürich"),
            ("what is it past", "cafés"),
            ("how deep is it",),
        ),
        (TOWER, ("who built the tower", "Gustave Eiffel", "Eiffel"), ("which city has one like it", "東京")),
    ),
    (
        (LONG + " It has a church", ("what does it have", "a church", "church"), ("who is the mayor",)),
        (RIVER, ("to which river", "the Aare", "Aare.")),
    ),
)
QUESTIONS = sum(len(part) - 1 for article in ARTICLES for part in article)


def paragraph(name: str, context: str, *questions: tuple[str, ...]) -> dict[str, Any]:
    """Return a paragraph of ``questions``: each a text and its answers, which are at their first place in it."""
    entries = []
    for number, (question, *answers) in enumerate(questions):
        found = [{"text": answer, "answer_start": context.index(answer)} for answer in answers]
        plausible = {} if found else {"plausible_answers": [{"text": context[:3], "answer_start": 0}]}
        entry = {"id": f"{name}-{number}", "question": question, "answers": found, "is_impossible": not found}
        entries.append(entry | plausible)
    return {"context": context, "qas": entries}


def squad(*articles: tuple[tuple[Any, ...], ...]) -> dict[str, Any]:
    """Return the content of a file: articles of paragraphs of a context and its questions."""
    data = [
        {"title": f"T{a}", "paragraphs": [paragraph(f"{a}-{p}", *part) for p, part in enumerate(article)]}
        for a, article in enumerate(articles)
    ]
    return {"version": "v2.0", "data": data}


def write_squad(folder: Path, train: Any = None, dev: Any = None) -> None:
    """Write both files into ``folder``; each has the same questions unless its content is given."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in {"train": train, "dev": dev}.items():
        text = json.dumps(content or squad(*ARTICLES), ensure_ascii=False)
        (folder / FILES[stem][0]).write_text(text, encoding="utf-8")


def module(root: Path, **options: Any) -> SquadDataModule:
    common = {"batch_size": 4, "eval_batch_size": 5, "vocabulary": 300, "download": False, "published_split": True}
    sizes = {"max_length": 32, "stride": 10, "max_question": 8}
    return loaded(SquadDataModule(str(root), **common | sizes | options))


def windows_of(data: SquadDataModule) -> Windows:
    scorer: Any = data.spec.tasks[0].scorer
    return scorer.windows


def perfect(batch: Batch) -> Tensor:
    """Return logits ``[B, S, 2]`` that are 10 at the target and 0 elsewhere."""
    places = torch.arange(batch.inputs["tokens"].shape[1])[:, None]
    return 10.0 * (places == batch.targets["squad"][:, None]).float()


def evaluated(data: SquadDataModule, logits: Any = perfect) -> dict[str, float]:
    evaluation = Evaluation(data.spec.tasks)
    for batch in data.test_dataloader():
        evaluation.update({"squad": logits(batch)}, batch.targets, batch.row_ids)
    return evaluation.compute()


def windows_of_split(data: SquadDataModule) -> int:
    """Return the first row of the test split."""
    row_ids = data.tasks["test"]["squad"].row_ids
    assert row_ids is not None
    return int(row_ids[0])
