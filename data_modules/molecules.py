"""Molecules and what they do: Tox21, ToxCast and ChEMBL as DeepChem publishes them (MoleculeNet, Wu et al. 2018)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from mtl.checks import join_names, require
from mtl.options import Address, FilePath, Name, NonEmpty, validated
from mtl.types import Batch, DataSpec, TaskKind

from .files.download import fetch
from .stream import StreamedRows
from .table import TableDataModule
from .tables.labels import TargetOptions
from .tables.options import ColumnOptions, OnInvalid

SMILES = "smiles"
# Their means are val/average; r2 has no lower bound, so one of a few labels would decide the mean
METRICS = {"binary": ["auroc", "auprc", "logloss"], "regression": ["pearson", "r2", "mse"]}


@dataclass(frozen=True)
class Variant:
    """A data set: the kind of its tasks, and the path and the sha256 of the file of each split that has one."""

    kind: TaskKind
    files: Mapping[str, tuple[str, str]]  # paths begin with a commit, since files of a later one may differ
    ignore: tuple[str, ...] = ()


YEARS = "examples/chembl/year_sets/chembl_5thresh_ts"  # in the order of the years of publication
CHEMBL, CHEMBL_TEST = "14855aa7a6648faeb148058a6808c5c6e73daee9", "b3e5e256fa1bbb4d625c03342febb32bf4acbf84"
TOX21 = "55d2274beebf3ce7e5e5eeec79891088b18c88f1/datasets/tox21.csv.gz"
TOXCAST = "38396f50430623108016f9d4c8416458d689abb4/deep_chem-master/examples/toxcast/processing/toxcast_data.csv.gz"
VARIANTS = {
    "tox21": Variant(
        "binary",
        {"train": (TOX21, "48b34e4e59a2bae6f95734cd206c1869ab355f50a5e50bb7371a21f861d5e297")},
        ("mol_id",),
    ),
    "toxcast": Variant(
        "binary", {"train": (TOXCAST, "56041515e0bb63c1787a26ecdbeb2bd7ae1f538681caa1b03f768853cf81b1a7")}
    ),
    "chembl": Variant(
        "regression",
        {
            "train": (
                f"{CHEMBL}/{YEARS}_train.csv.gz",
                "fe7282af9f2ab8e62382abc2dac889c6505b2935d5cee6a39497365028be1a22",
            ),
            "val": (
                f"{CHEMBL}/{YEARS}_valid.csv.gz",
                "bcf7455c1beab8145a03ca81ac27477d3256178df5aaf4d27d26232aaf83177d",
            ),
            "test": (
                f"{CHEMBL_TEST}/{YEARS}_test.csv.gz",
                "e5a421910dea251bb7be39994cf7cf0ccdcfea8154e905323f1a5161828537dc",
            ),
        },
    ),
}


class MoleculesDataModule(TableDataModule):
    """Serve the molecules of a ``variant``, as bits of their fingerprints, with many targets and few labels.

    ``tox21`` and ``toxcast``: 12 and 617 binary tasks, active or not in an assay. ``chembl``: 691 regressions, the
    strength of the binding to a protein, by three files of earlier to later years. ``tasks`` names the columns to
    predict, also by patterns; the other targets are no inputs. Molecules that cannot be read have no bits. For the
    other options see ``TableDataModule``.
    """

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        variant: Literal["tox21", "toxcast", "chembl"] = "tox21",
        tasks: NonEmpty[Name] = ("*",),
        on_invalid: OnInvalid = "missing",
        download: bool = True,
        base_url: Address = "https://raw.githubusercontent.com/deepchem/deepchem",
        **common: Any,
    ) -> None:
        self.variant, self.patterns, self.download, self.base_url = VARIANTS[variant], tasks, download, base_url
        paths = {name: data_dir / "molecules" / Path(path).name for name, (path, _) in self.variant.files.items()}
        options = {"columns": {SMILES: ColumnOptions(kind="molecule")}, "ignore": self.variant.ignore} | common
        options |= {f"{name}_path": path for name, path in paths.items() if name != "train"}
        super().__init__(paths["train"], {"all": self.variant.kind}, data_dir, on_invalid=on_invalid, **options)

    def prepare_data(self) -> None:
        for split, path in self._files().items():
            address, sha256 = self.variant.files[split]
            if not path.exists():
                fetch(f"{self.base_url.rstrip('/')}/{address}", path, sha256, self.download)

    def load(self) -> tuple[DataSpec, dict[str, Batch | StreamedRows]]:
        split = next(iter(self._files()))
        others = (SMILES, *self.variant.ignore)
        columns = [name for name in self.open(split).columns if name not in others]
        fitting = {name: [column for column in columns if fnmatchcase(column, name)] for name in self.patterns}
        absent = [name for name, targets in fitting.items() if not targets]
        require(not absent, f"data.tasks: {self.paths[split]} has no target {join_names(absent)}")
        targets = dict.fromkeys(column for targets in fitting.values() for column in targets)
        self.ignore = [*self.variant.ignore, *(column for column in columns if column not in targets)]
        tasks = {re.sub(r"[./\\]", "_", column): column for column in targets}  # names of tasks have no dots
        options = {"kind": self.variant.kind, "metrics": METRICS[self.variant.kind]}
        self.labels = TargetOptions.from_tasks({name: {**options, "column": tasks[name]} for name in tasks})
        return super().load()
