"""Census-Income and KuaiRand from small made-up files: columns by name, tasks, splits, and the archive of UCI."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from mtl.data_modules.census_income import COLUMNS, NUMERIC_COLUMNS, CensusIncomeDataModule
from mtl.data_modules.kuairand import FEEDBACK, KuaiRandDataModule

from mtl.checks import InputError
from mtl.types import Categorical, Numeric
from tests.file_server import serving
from tests.loaded import loaded
from tests.log_files import write_census, write_kuairand


def ready(kind: Any, root: Path, **options: Any) -> Any:
    return loaded(kind(**{"data_dir": str(root), "batch_size": 16, "download": False} | options))


def test_census_has_the_tasks_and_inputs_of_the_paper(tmp_path: Path) -> None:
    write_census(tmp_path / "census_income")
    data = ready(CensusIncomeDataModule, tmp_path)
    assert (len(COLUMNS), len(NUMERIC_COLUMNS)) == (42, 8)
    assert {split: len(rows) for split, rows in data.splits.items()} == {"train": 60, "val": 15, "test": 15}
    assert data.splits["train"].targets["income"].tolist() == [float(row % 4 == 0) for row in range(60)]
    assert data.splits["train"].targets["never_married"].tolist() == [float(row % 3 > 0) for row in range(60)]
    read = set(data.row_encoder.columns)
    assert read == {*COLUMNS} - {"income", "education", "marital stat", "instance weight", "year"}  # one year only
    assert data.spec.inputs["sex"] == Categorical(4)  # "?" is a category
    assert data.spec.inputs["numeric columns"] == Numeric(7)
    person = dict.fromkeys(COLUMNS, "NA") | dict.fromkeys(NUMERIC_COLUMNS, 7) | {"sex": "Yes"}
    assert data.row_encoder.encode(pl.DataFrame([person]), "rows")["sex"].tolist() == [3]
    whole = ready(CensusIncomeDataModule, tmp_path, ignore=["marital stat"])
    assert {"education", "instance weight"} <= set(whole.row_encoder.columns)


@pytest.mark.parametrize(("old", "new"), [(", 95, ", ", "), ("50000+.", "50000")])
def test_a_damaged_line_is_found(old: str, new: str, tmp_path: Path) -> None:
    write_census(tmp_path / "census_income")
    file = tmp_path / "census_income" / "census-income.data"
    head, *lines = file.read_text().splitlines()
    lines[3:5] = [line.replace(old, new) for line in lines[3:5]]
    file.write_text("\n".join([head, *lines]))
    with pytest.raises(InputError, match=r"census-income\.data is damaged"):
        ready(CensusIncomeDataModule, tmp_path)


def test_the_archive_of_uci_is_unpacked_if_the_user_trusts_it(tmp_path: Path) -> None:
    site = tmp_path / "site"
    write_census(site)
    with tarfile.open(site / "census.tar.gz", "w:gz") as archive:
        for file in sorted(site.glob("census-income.*")):
            archive.add(file, file.name)
    with zipfile.ZipFile(site / "census+income+kdd.zip", "w") as outer:
        outer.write(site / "census.tar.gz", "census.tar.gz")
    with serving(site) as url:
        with pytest.raises(InputError, match=r"no published checksum.*put it at .*kdd.zip, or set data.unverified="):
            ready(CensusIncomeDataModule, tmp_path, download=True, base_url=url)
        data = ready(CensusIncomeDataModule, tmp_path, download=True, unverified=True, base_url=url)
    assert len(data.splits["train"]) == 60
    with pytest.raises(InputError, match=r"cannot download census\+income\+kdd.zip: .*\. Without the network"):
        ready(CensusIncomeDataModule, tmp_path / "b", download=True, unverified=True, base_url="http://127.0.0.1:9")


@pytest.mark.parametrize("log", ["standard", "random"])
def test_kuairand_is_split_by_time(log: str, tmp_path: Path) -> None:
    root = tmp_path / "[a]*"  # is no pattern
    write_kuairand(root / "KuaiRand-Pure" / "data")
    data = ready(KuaiRandDataModule, root, log=log, split={"fractions": [0.5, 0.25, 0.25]})
    rows = 120 if log == "standard" else 60
    assert [len(part) for part in data.splits.values()] == [rows // 2, rows // 4, rows // 4]
    few = ready(KuaiRandDataModule, root, log=log, tasks=["long_view", "is_click"])  # other feedback is no input
    assert set(few.row_encoder.columns) == {"user_id", "video_id", "hourmin", "tab", "duration_ms"}
    assert {task.name: task.kind for task in data.spec.tasks} == {
        name: "regression" if name.endswith(("_time", "_ms")) else "binary" for name in FEEDBACK
    }
    videos = data.row_encoder.vocabularies["video_id"].values
    found = sorted(int(videos[id - 1]) for id in data.splits["train"].inputs["video_id"])
    assert found == list(range(60)) if log == "standard" else list(range(2, 32))  # as the files were made
