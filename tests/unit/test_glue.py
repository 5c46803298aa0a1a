"""GLUE: reading the official layout, splits, fetching, messages about missing and damaged files."""

from __future__ import annotations

import hashlib
import math
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules.files import glue as glue_files
from mtl.data_modules.files.glue import ARCHIVES, SOURCES
from mtl.data_modules.glue import TASKS, GlueDataModule
from mtl.data_modules.texts.glue import read_part

from tests.file_server import serving
from tests.glue_files import HEADERS, row, write_glue, write_task
from tests.loaded import loaded

SIZES = {"rte": 40, "stsb": 30, "cola": 21}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_glue(folder / "glue", SIZES)
    return folder


def module(root: Path, **options: Any) -> GlueDataModule:
    common = {"tasks": list(SIZES), "batch_size": 4, "eval_batch_size": 8, "download": False, "vocabulary": 100}
    return loaded(GlueDataModule(str(root), **common | options))


def same_rows(one: Any, other: Any) -> bool:
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.offsets, other.offsets)


def test_all_tasks_have_the_metrics_and_weights_of_the_paper() -> None:
    assert len(TASKS) == 8
    data = GlueDataModule("nowhere", tasks=list(SOURCES), batch_size=2)
    specs = {name: data._spec_of(name) for name in SOURCES}
    small = {"rte", "mrpc", "stsb", "cola", "wnli"} | {"rt", "wic", "cb", "boolq", "copa"}  # in GLUE, and in GLUE++
    assert {name for name, spec in specs.items() if spec.small} == small
    assert (specs["mnli"].kind, specs["mnli"].num_classes) == ("multiclass", 3)
    weights = {"stsb": 1.0, **dict.fromkeys(("mnli", "cb"), 1 / math.log(3))}
    assert {name: spec.weight for name, spec in specs.items()} == {n: weights.get(n, 1 / math.log(2)) for n in SOURCES}
    assert specs["qqp"].metrics == specs["mrpc"].metrics == ("accuracy", "f1")
    plain = GlueDataModule("nowhere", tasks=["rte"], loss_scale=False, batch_size=2)
    assert plain._spec_of("rte").weight == 1.0


@pytest.mark.parametrize("task", [name for name, one in SOURCES.items() if one.paths()[0].endswith(".tsv")])
def test_every_table_is_read(task: str, tmp_path: Path) -> None:
    write_task(tmp_path, task, train=12)
    [file] = [tmp_path / path for path in SOURCES[task].paths("train")]
    found = read_part(tmp_path, task, "train")
    texts, labels = [column for column in (found.first, found.second) if column], found.labels
    lines = file.read_text().splitlines()[task in HEADERS :]
    assert len(labels) == len(lines) == 12
    assert all(text in line for column in texts for text, line in zip(column, lines, strict=True))
    assert len({*texts[0], *texts[-1]}) == 12 * len(texts)
    classes = len(SOURCES[task].classes)
    assert labels.tolist() == [n % classes if classes else n % 11 / 2 for n in range(12)]


def test_quotes_and_carriage_returns_mean_nothing(tmp_path: Path) -> None:
    file = tmp_path / "SST-2" / "train.tsv"
    file.parent.mkdir()
    file.write_bytes('\ufeffsentence\tlabel\r\nhe said "no\t1\r\n"yes" \x85 he said\t0\r\n'.encode())
    rows = read_part(tmp_path, "sst2", "train")
    assert (rows.first, rows.labels.tolist()) == (['he said "no', '"yes" \x85 he said'], [1.0, 0.0])


def test_a_tenth_of_the_training_rows_validates(root: Path) -> None:
    data, other = module(root), module(root, seed=1)
    assert {task: len(rows) for task, rows in data.tasks["train"].items()} == {"rte": 36, "stsb": 27, "cola": 19}
    assert {task: len(rows) for task, rows in data.tasks["val"].items()} == {"rte": 4, "stsb": 3, "cola": 2}
    assert not same_rows(data.tasks["val"]["rte"], other.tasks["val"]["rte"])
    assert same_rows(data.tasks["train"]["rte"], module(root, tasks=["stsb", "rte", "cola"]).tasks["train"]["rte"])


def test_published_split_selects_on_the_development_rows(root: Path) -> None:
    data = module(root, published_split=True)
    assert {task: len(rows) for task, rows in data.tasks["train"].items()} == SIZES
    for task in SIZES:
        assert data.tasks["val"][task] is data.tasks["test"][task]
        assert len(data.tasks["val"][task]) == 8


def test_max_rows_draws_training_rows(root: Path) -> None:
    data = module(root, max_rows={"rte": 20, "cola": 1000})
    assert [len(data.tasks[split]["rte"]) for split in ("train", "val", "test")] == [18, 2, 8]
    assert len(data.tasks["train"]["cola"]) == 19
    _, one = data.read_tasks()
    _, other = module(root, max_rows={"rte": 20}, seed=1).read_tasks()
    assert set(one["train"]["rte"].first) != set(other["train"]["rte"].first)


def test_short_lines_inside_qqp_are_left_out(tmp_path: Path) -> None:
    """Its older official files have some, and everyone who reads them leaves them out."""
    file = tmp_path / "QQP" / "train.tsv"
    file.parent.mkdir()
    file.write_text(HEADERS["qqp"] + "\n1\t2\t3\ta\tb\t1\n1\t2\t3\tbroken\n1\t2\t3\tc\td\t0\n")
    rows = read_part(tmp_path, "qqp", "train")
    assert (rows.first, rows.second, rows.labels.tolist()) == (["a", "c"], ["b", "d"], [1.0, 0.0])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the archives of RTE and QQP and the files of MRPC as on their site, with their checksums expected."""
    data, rows = tmp_path / "site" / "glue" / "data", tmp_path / "site" / "senteval" / "senteval_data"
    data.mkdir(parents=True)
    rows.mkdir(parents=True)
    for task, folder in (("rte", "RTE"), ("qqp", "QQP-clean")):
        source = SOURCES[task]
        write_task(tmp_path / "made", task)
        with zipfile.ZipFile(data / source.archive, "w") as archive:
            for file in sorted((tmp_path / "made" / source.folder).iterdir()):
                archive.write(file, f"{folder}/{file.name}")
            archive.writestr(f"__MACOSX/{folder}/._train.tsv", "nothing")
        monkeypatch.setitem(ARCHIVES, source.archive, sha256(data / source.archive))
    lines = [row("mrpc", number, random.Random(number)) for number in range(20)]
    (rows / "msr_paraphrase_train.txt").write_bytes("\r\n".join(["\ufeff" + HEADERS["mrpc"], *lines, ""]).encode())
    (data / "mrpc_dev_ids.tsv").write_text("".join(f"#1 ID-{n}\t#2 ID-{n}\n" for n in (3, 5, 8)))
    for name, file in (("MRPC_TRAIN", rows / "msr_paraphrase_train.txt"), ("MRPC_DEV_IDS", data / "mrpc_dev_ids.tsv")):
        monkeypatch.setattr(glue_files, name, (file.name, sha256(file)))
    with serving(tmp_path / "site") as url:
        yield url


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_missing_tasks_are_fetched(tmp_path: Path, site: str) -> None:
    root = tmp_path / "data"
    data = module(root, tasks=["rte", "qqp", "mrpc"], download=True, base_url=site)
    assert [len(data.tasks["test"][task]) for task in ("rte", "qqp", "mrpc")] == [8, 8, 3]
    assert (root / "glue" / "QQP" / "dev.tsv").read_bytes() == (tmp_path / "made" / "QQP" / "dev.tsv").read_bytes()
    train, dev = ((root / "glue" / "MRPC" / f"{stem}.tsv").read_text().splitlines() for stem in ("train", "dev"))
    assert train[0] == dev[0] == HEADERS["mrpc"]
    assert [line.split("\t")[1] for line in dev[1:]] == ["#1 ID-3", "#1 ID-5", "#1 ID-8"]
    assert len(train) == 18
    assert not [path.name for path in (root / "glue").glob(".*") if path.is_dir()]  # nothing half unpacked
    module(root, tasks=["rte", "qqp", "mrpc"], download=True, base_url="http://127.0.0.1:9")  # all is there
