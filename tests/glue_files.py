"""Write small files of GLUE and of the tasks that MT-TaG adds, in their official layouts."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtl.data_modules.files.glue import SOURCES

WORDS = ("the", "a", "cat", "dog", "bird", "house", "sees", "likes", "finds", "small", "old", "never")
HEADERS = {
    "rte": "index\tsentence1\tsentence2\tlabel",
    "wnli": "index\tsentence1\tsentence2\tlabel",
    "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "stsb": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
    "sst2": "sentence\tlabel",
    "qqp": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
    "qnli": "index\tquestion\tsentence\tlabel",
    "mnli": "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
}
# Options of a run on such files, with a tiny encoder; add tasks, and ``paths.data_dir``
TINY = ["data=glue", "data.download=false", "data.vocabulary=100", "data.batch_size=8", "data.eval_batch_size=16"]
TINY += ["network.config={hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2}", "recipe.learning_rate=1e-3"]


def sentence(draw: random.Random, low: int = 3, high: int = 12) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(low, high)))


def entry(task: str, number: int, draw: random.Random) -> dict[str, Any]:
    """Return an object of a file of SuperGLUE; the labels take turns."""
    one, two, even = sentence(draw), sentence(draw), number % 2 == 0
    if task == "copa":
        asked = ("cause", "effect")[number % 2]
        return {"premise": one, "choice1": two, "choice2": sentence(draw), "question": asked, "label": int(even)}
    if task == "multirc":
        answers = [{"text": sentence(draw), "label": n, "idx": n} for n in (0, 1)]
        return {"idx": number, "passage": {"text": one, "questions": [{"question": two, "answers": answers}]}}
    if task == "wic":  # the marked words are the second ones
        places = [(len(text.split()[0]) + 1, len(" ".join(text.split()[:2]))) for text in (one, two)]
        marks = {f"{end}{n}": place for n in (1, 2) for end, place in zip(("start", "end"), places[n - 1], strict=True)}
        return {"word": "x", "sentence1": one, "sentence2": two, "label": even, **marks}
    label = even if task == "boolq" else SOURCES[task].classes[number % 3]
    return dict(zip(SOURCES[task].texts, (one, two), strict=True)) | {"label": label}


def row(task: str, number: int, draw: random.Random) -> str:
    """Return a line of a task; the labels take turns."""
    source, texts = SOURCES[task], (sentence(draw), sentence(draw))
    label = source.classes[number % len(source.classes)] if source.classes else f"{number % 11 / 2:.3f}"
    if task == "cola":
        return f"gj04\t{label}\t{'' if label == '1' else '*'}\t{texts[0]}"
    names = SOURCES[task].columns or HEADERS[task].split("\t")
    cells = {name: f"{name}-{number}" for name in names}
    cells |= dict(zip(source.texts, texts, strict=False)) | {source.label: label}
    return "\t".join(cells.values())


def write_task(folder: Path, task: str, train: int = 30, dev: int = 8) -> None:
    """Write the files of one task into its folder in ``folder``."""
    (folder / SOURCES[task].folder).mkdir(parents=True, exist_ok=True)
    sizes = {part: train if part == "train" else dev for part in SOURCES[task].rows}
    if task == "imdb":
        return write_imdb(folder / SOURCES[task].files[0], sizes)
    if task == "rt":  # one file for each class, of which 80 % of the lines are for training
        sizes = dict.fromkeys(("neg", "pos"), train * 5 // 8)
    for part, size in sizes.items():
        draw = random.Random(f"{task} {part}")
        if task == "rt":
            lines = [sentence(draw) for _ in range(size)]
        elif task == "yelp":
            lines = [f'"{1 + n % 2}","{sentence(draw)}\\nsaid ""{sentence(draw)}"""' for n in range(size)]
        elif SOURCES[task].files[0].endswith(".jsonl"):
            lines = [json.dumps(entry(task, n, draw)) for n in range(size)]
        else:
            lines = [HEADERS[task]] if task in HEADERS else []
            lines += [row(task, number, draw) for number in range(size)]
        [path] = [f"rt-polaritydata/rt-polarity.{part}"] if task == "rt" else SOURCES[task].paths(part)
        (folder / path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_imdb(path: Path, sizes: Mapping[str, int]) -> None:
    """Write IMDB's archive; its reviews without a label belong to no part."""
    with tarfile.open(path, "w:gz") as archive:
        for part, size in sizes.items():
            draw = random.Random(part)
            for number in range(size + 1):
                content = sentence(draw).encode()
                label = "unsup" if number == size else ("neg", "pos")[number % 2]
                member = tarfile.TarInfo(f"aclImdb/{part}/{label}/{number}_7.txt")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_glue(folder: Path, sizes: Mapping[str, int] | None = None) -> None:
    """Write small files of the tasks of ``sizes``, by default of all, into ``folder``."""
    for task, train in (sizes or dict.fromkeys(SOURCES, 30)).items():
        write_task(folder, task, train)
