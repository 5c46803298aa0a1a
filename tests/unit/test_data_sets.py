"""What holds for every data set: rows that fit the DataSpec, splits, seeds, caches, missing and damaged files."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules import kuairand, movielens, squad
from mtl.data_modules.base import TensorDataModule
from mtl.data_modules.books import BooksDataModule
from mtl.data_modules.celeba import CelebADataModule
from mtl.data_modules.census_income import CensusIncomeDataModule
from mtl.data_modules.digits import DigitsDataModule
from mtl.data_modules.four_mnists import FourMNISTsDataModule
from mtl.data_modules.glue import GlueDataModule
from mtl.data_modules.jester import JesterDataModule
from mtl.data_modules.kuairand import KuaiRandDataModule
from mtl.data_modules.molecules import MoleculesDataModule
from mtl.data_modules.movielens import MovieLensDataModule
from mtl.data_modules.multi_mnist import MultiMNISTDataModule
from mtl.data_modules.omniglot import OmniglotDataModule
from mtl.data_modules.squad import SquadDataModule
from mtl.data_modules.state import spec_state
from mtl.data_modules.synthetic_moe import SyntheticMoEDataModule
from mtl.data_modules.synthetic_pairs import SyntheticPairsDataModule
from mtl.data_modules.synthetic_recovery import SyntheticRecoveryDataModule
from mtl.data_modules.task_batches import TasksDataModule
from torchvision.datasets import MNIST, SVHN, Omniglot

from mtl.checks import InputError
from mtl.types import MISSING_CLASS, Bag, Batch, Categorical, Image, Tokens, has_label
from tests.digit_files import write_digits
from tests.file_server import serving, zipped
from tests.loaded import loaded
from tests.omniglot_files import write_archive

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Case:
    """A data set: its class and options, folders of its files, and some files to damage."""

    kind: Callable[..., TensorDataModule]
    options: dict[str, Any] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    seeded: bool = True  # whether ``seed`` changes the rows

    def make(self, root: Path, **options: Any) -> TensorDataModule:
        where = {"data_dir": str(root), "download": False} if self.folders else {}
        return self.kind(**{"batch_size": 16, "eval_batch_size": 32} | where | self.options | options)

    def ready(self, root: Path, **options: Any) -> TensorDataModule:
        return loaded(self.make(root, **options))


FACES = ("celeba/list_attr_celeba.txt", "celeba/list_eval_partition.txt", "celeba/img_align_celeba/000003.jpg")
LOG = "KuaiRand-Pure/data/log_standard_4_08_to_4_21_pure.csv"
DRAWING = "omniglot-py/images_background/Gujarati/character01/0001_01.png"
PIXELS = ("MNIST/raw/train-images-idx3-ubyte", "MNIST/raw/t10k-labels-idx1-ubyte")
SIZES = {"rows": [60, 20, 20]}
FACE = {"attributes": ["Young", "Male"], "scale": 8}
DRAWINGS = {"alphabets": ["Gujarati", "Korean"], "side": 35}
GLUE = {"tasks": ["rte", "stsb"], "vocabulary": 100}
SQUAD = {"vocabulary": 300, "max_length": 32, "stride": 10, "max_question": 8}
CENSUS = "census_income/census-income.data"
CASES = {
    "movielens": Case(MovieLensDataModule, {"negatives": "per_user"}, ("ml-1m",), ("ml-1m/ratings.dat",)),
    "books": Case(BooksDataModule, {"min_records": 1}, ("bookcrossing",), ("bookcrossing/BX-Book-Ratings.csv",)),
    "jester": Case(JesterDataModule, {}, ("jester",), ("jester/jester-data-tiny.csv",)),
    "celeba": Case(CelebADataModule, FACE, ("celeba",), FACES, seeded=False),
    "census_income": Case(CensusIncomeDataModule, {}, ("census_income",), (CENSUS,), seeded=False),
    "molecules": Case(MoleculesDataModule, {}, ("molecules",), ("molecules/tox21.csv.gz",)),
    "kuairand": Case(KuaiRandDataModule, {}, ("KuaiRand-Pure",), (LOG,), seeded=False),
    "digits": Case(DigitsDataModule, {}, ("MNIST", "SVHN"), ("SVHN/test_32x32.mat",)),
    "multi_mnist": Case(MultiMNISTDataModule, SIZES, ("MNIST",), PIXELS),
    "four_mnists": Case(FourMNISTsDataModule, {}, ("MNIST",)),
    "omniglot": Case(OmniglotDataModule, DRAWINGS, ("omniglot-py",), (DRAWING,)),
    "glue": Case(GlueDataModule, GLUE, ("glue",), ("glue/RTE/train.tsv",)),
    "squad": Case(SquadDataModule, SQUAD, ("squad",), ("squad/train-v2.0.json",)),
    "synthetic_moe": Case(SyntheticMoEDataModule, {"num_groups": 2, "tasks_per_group": 3, **SIZES}),
    "synthetic_pairs": Case(SyntheticPairsDataModule, {"num_pairs": 2, "input_dim": 8, **SIZES}),
    "synthetic_recovery": Case(SyntheticRecoveryDataModule, SIZES),
    "synthetic_published": Case(SyntheticRecoveryDataModule, {"design": "published", **SIZES}),
}
ON_DISK = {name: case for name, case in CASES.items() if case.folders}


@pytest.fixture
def root(tiny_data: Path, tmp_path: Path, case: Case) -> Path:
    """Return a folder with the files of ``case`` alone."""
    for folder in case.folders:
        shutil.copytree(tiny_data / folder, tmp_path / folder)
    return tmp_path


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)


def every(cases: dict[str, Case]) -> Any:
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


def rows_of(data: TensorDataModule, split: str) -> dict[str, Batch]:
    """Return the rows of a split, by task; those that all tasks share under one name."""
    if isinstance(data, TasksDataModule):
        return {task: rows.select(torch.arange(len(rows))) for task, rows in data.tasks[split].items()}
    return {"": data.splits[split]}


def content(data: TensorDataModule, split: str) -> dict[str, Any]:
    """Return all values of a split as lists of bytes, NaN included."""
    return {
        f"{task}/{name}": values.numpy().tobytes()
        for task, rows in rows_of(data, split).items()
        for name, values in {**rows.inputs, **{f"target {name}": value for name, value in rows.targets.items()}}.items()
    }


@every(CASES)
def test_rows_fit_the_spec(case: Case, root: Path) -> None:
    data = case.ready(root)
    tasks = {task.name: task for task in data.spec.tasks}
    for split, loader in zip(
        SPLITS, (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()), strict=True
    ):
        found = 0
        for batch in loader:
            found += len(batch)
            assert batch.inputs.keys() == data.spec.inputs.keys()
            for name, kind in data.spec.inputs.items():
                values = batch.inputs[name]
                if isinstance(kind, Image):
                    assert values.dtype == torch.uint8
                    assert tuple(values.shape[1:]) == (kind.channels, kind.height, kind.width)
                elif isinstance(kind, Categorical | Bag | Tokens):
                    most = kind.vocab if isinstance(kind, Tokens) else kind.size
                    assert values.dtype == torch.int64
                    assert 0 <= int(values.min()) <= int(values.max()) < most
                else:
                    assert (values.dtype, values.shape[1:]) == (torch.float32, (kind.width,))
            for name, target in batch.targets.items():
                task = tasks[name]
                assert len(target) == len(batch)
                if task.kind == "regression":
                    assert target.is_floating_point()
                elif task.kind == "binary":
                    assert set(target[has_label(task, target)].tolist()) <= {0.0, 1.0}
                else:
                    assert target.dtype == torch.int64
                    most = task.num_classes if task.kind == "multiclass" else batch.inputs["tokens"].shape[1]
                    assert bool(((target >= 0) & (target < most) | (target == MISSING_CLASS)).all())
                missing = target.isnan().any() if target.is_floating_point() else False
                some = case.kind is MoleculesDataModule  # not each molecule was in each assay
                assert (
                    not missing
                    or some
                    or (case.kind.__base__.__name__ == "InteractionsDataModule" and name == "rating")
                )
        assert found == sum(len(rows) for rows in rows_of(data, split).values()) > 0
    for kind in data.spec.inputs.values():
        if isinstance(kind, Image):
            pixels = [rows.inputs["image"] for rows in rows_of(data, "train").values()]
            train = torch.cat(pixels).double() / 255
            assert kind.mean == pytest.approx(float(train.mean()), abs=1e-9)
            assert kind.std == pytest.approx(float(train.std(correction=0)), abs=1e-9)


@every(CASES)
def test_no_row_is_in_two_splits(case: Case, root: Path) -> None:
    data = case.ready(root)
    for task in rows_of(data, "train"):
        seen: list[set[bytes]] = []
        for split in SPLITS:
            rows = rows_of(data, split)[task]
            own = [] if rows.row_ids is None else [rows.row_ids]  # of texts that occur in both files of SQuAD
            columns = [values.numpy().reshape(len(rows), -1) for values in (*rows.inputs.values(), *own)]
            seen.append({b"|".join(column[row].tobytes() for column in columns) for row in range(len(rows))})
            assert len(seen[-1]) == len(rows) or case.kind is MultiMNISTDataModule  # draws its pairs independently
        assert sum(map(len, seen)) == len(set.union(*seen))


@every(CASES)
def test_rows_depend_on_the_seed_only_and_a_second_setup_reads_the_cache(case: Case, root: Path) -> None:
    one = case.ready(root)
    before = {path: path.stat().st_mtime_ns for path in (root / "cache").rglob("*.pt")}
    again, other = case.ready(root, shuffle_seed=5), case.make(root, seed=1)
    assert {path: path.stat().st_mtime_ns for path in (root / "cache").rglob("*.pt")} == before
    other.prepare_data()
    other.setup()
    for split in SPLITS:
        assert content(one, split) == content(again, split)
    assert (content(one, "train") != content(other, "train")) == case.seeded
    assert spec_state(one.spec) == spec_state(again.spec)
    restored = case.make(root)
    restored.load_state_dict(one.state_dict())
    assert spec_state(restored.spec) == spec_state(one.spec)


@every(ON_DISK)
def test_missing_files_are_one_sentence(case: Case, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        case.ready(tmp_path)
    assert re.search(
        rf"{tmp_path}/({'|'.join(case.folders)})/?.* is missing and data.download=false: ", str(caught.value)
    )
    assert "\n" not in str(caught.value)


def damages(content: bytes) -> list[bytes]:
    """Return twenty damaged versions of a file."""
    chance = random.Random(0)
    found = [b"", b"\0", b"\xff" * 50, b"\n" * 5, b"<html></html>", content + b"more", content * 2, content[1:]]
    found += [content[: len(content) * part // 5] for part in range(1, 5)]
    for _ in range(4):
        index = min(int(len(content) * chance.random() ** 4), len(content) - 1)  # headers more often than the rest
        found.append(content[:index] + bytes([chance.randrange(256)]) + content[index + 1 :])
        found.append(content[:index] + b"9" * 30 + content[index:])
    return found


@pytest.mark.parametrize(
    ("case", "name"), [pytest.param(case, name, id=name) for case in ON_DISK.values() for name in case.files]
)
def test_every_damage_is_read_or_refused_by_one_sentence(case: Case, root: Path, name: str) -> None:
    file, messages = root / name, []
    for content in damages(file.read_bytes()):
        file.write_bytes(content)
        shutil.rmtree(root / "cache", ignore_errors=True)
        try:
            case.ready(root)
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 5
    assert [message for message in messages if not message.isprintable() or len(message) > 1000] == []
    file.unlink()
    for replacement in (file.mkdir, lambda: os.mkfifo(file), lambda: file.symlink_to("nowhere")):
        replacement()
        shutil.rmtree(root / "cache", ignore_errors=True)
        with pytest.raises(InputError):
            case.ready(root)
        file.rmdir() if file.is_dir() else file.unlink()


def digest(kind: str, file: Path) -> str:
    return hashlib.new(kind, file.read_bytes()).hexdigest()


def movielens_site(site: Path, tiny: Path, patch: pytest.MonkeyPatch) -> None:
    archive = zipped(site / "ml-1m.zip", tiny, "ml-1m")
    patch.setitem(movielens.VARIANTS, "1m", replace(movielens.VARIANTS["1m"], md5=digest("md5", archive)))


def digits_site(site: Path, tiny: Path, patch: pytest.MonkeyPatch) -> None:
    names = write_digits(site, compressed=True)
    patch.setattr(MNIST, "resources", [(name, digest("md5", site / name)) for name in names])
    parts = {part: ["", name, digest("md5", tiny / "SVHN" / name)] for part, (_, name, _) in SVHN.split_list.items()}
    patch.setattr(SVHN, "split_list", parts)
    for _, name, _ in parts.values():
        shutil.copy(tiny / "SVHN" / name, site)


def omniglot_site(site: Path, tiny: Path, patch: pytest.MonkeyPatch) -> None:
    parts = {"images_background": "Gujarati", "images_evaluation": "Korean"}
    patch.setattr(Omniglot, "zips_md5", {part: write_archive(site, part, {name: 2}) for part, name in parts.items()})


def squad_site(site: Path, tiny: Path, patch: pytest.MonkeyPatch) -> None:
    for stem, (name, _) in squad.FILES.items():
        file = Path(shutil.copy(tiny / "squad" / name, site))
        patch.setitem(squad.FILES, stem, (name, digest("sha256", file)))


def kuairand_site(site: Path, tiny: Path, patch: pytest.MonkeyPatch) -> None:
    file = site / "KuaiRand-Pure.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        archive.add(tiny / "KuaiRand-Pure", "KuaiRand-Pure")
    patch.setitem(kuairand.ARCHIVES, "pure", ("KuaiRand-Pure", digest("md5", file)))


SITES = {
    "kuairand": kuairand_site,
    "movielens": movielens_site,
    "digits": digits_site,
    "omniglot": omniglot_site,
    "squad": squad_site,
}


@pytest.mark.parametrize("name", SITES)
def test_missing_files_are_fetched_once_and_checked(
    name: str, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, site = CASES[name], tmp_path / "site"
    site.mkdir()
    SITES[name](site, tiny_data, monkeypatch)
    addresses = ["mnist_url", "svhn_url"] if name == "digits" else ["base_url"]
    with serving(site) as url:
        there, gone = ({"download": True} | dict.fromkeys(addresses, at) for at in (url, "http://127.0.0.1:9"))
        data = case.ready(tmp_path / "data", **there)
        assert all(len(rows) > 0 for split in SPLITS for rows in rows_of(data, split).values())
        assert not [path for path in (tmp_path / "data").rglob("*") if path.name.endswith(".unpacked")]
        assert content(case.ready(tmp_path / "data", **gone), "train") == content(data, "train")
        for file in site.rglob("*.*"):
            if file.is_file():
                file.write_bytes(file.read_bytes() + b"more")
        with pytest.raises(InputError, match=r"cannot download .*hash of downloaded file .*paths\.data_dir"):
            case.ready(tmp_path / "wrong", **there)
    left = [path.name for path in (tmp_path / "wrong").rglob("*") if path.is_file() and path.stat().st_size]
    assert left == []
