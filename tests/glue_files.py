"""Write small files in GLUE's official layout."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

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


def row(task: str, number: int, draw: random.Random) -> str:
    """Return a line of a task; the labels take turns."""
    source, texts = SOURCES[task], (sentence(draw), sentence(draw))
    label = source.classes[number % len(source.classes)] if source.classes else f"{number % 11 / 2:.3f}"
    if task == "cola":
        return f"gj04\t{label}\t{'' if label == '1' else '*'}\t{texts[0]}"
    cells = {name: f"{name}-{number}" for name in HEADERS[task].split("\t")}
    cells |= dict(zip(source.texts, texts, strict=False)) | {source.label: label}
    return "\t".join(cells.values())


def write_task(folder: Path, task: str, train: int = 30, dev: int = 8) -> None:
    """Write the files of one task into its folder in ``folder``."""
    (folder / SOURCES[task].folder).mkdir(parents=True, exist_ok=True)
    for stem in SOURCES[task].rows:
        draw = random.Random(f"{task} {stem}")
        lines = [HEADERS[task]] if task in HEADERS else []
        lines += [row(task, number, draw) for number in range(train if stem == "train" else dev)]
        (folder / SOURCES[task].folder / f"{stem}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_glue(folder: Path, sizes: Mapping[str, int] | None = None) -> None:
    """Write small files of the tasks of ``sizes``, by default of all, into ``folder``."""
    for task, train in (sizes or dict.fromkeys(SOURCES, 30)).items():
        write_task(folder, task, train)
