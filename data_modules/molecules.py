"""Molecules and what they do: Tox21, ToxCast and ChEMBL as DeepChem publishes them (MoleculeNet, Wu et al. 2018)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from mtl.options import Address, FilePath, Name, NonEmpty, validated
from mtl.types import Batch, DataSpec, TaskKind

from .files.download import fetch
from .stream import StreamedRows
from .table import TableDataModule
from .tables.options import ColumnOptions, OnInvalid
from .tables.patterns import expand_patterns

SMILES, NUMBER = "smiles", "mol_id"  # columns that are no targets
# Their means are val/average; r2 has no lower bound, so one of a few labels would decide the mean
METRICS = {"binary": ["auroc", "auprc", "logloss"], "regression": ["pearson", "r2", "mse"]}

# Paths begin with a commit, since files of a later one may differ
TOX21 = "55d2274beebf3ce7e5e5eeec79891088b18c88f1/datasets/tox21.csv.gz"
TOXCAST = "38396f50430623108016f9d4c8416458d689abb4/deep_chem-master/examples/toxcast/processing/toxcast_data.csv.gz"
YEARS = "examples/chembl/year_sets/chembl_5thresh_ts"  # in the order of the years of publication
CHEMBL = f"14855aa7a6648faeb148058a6808c5c6e73daee9/{YEARS}"
LATEST = f"b3e5e256fa1bbb4d625c03342febb32bf4acbf84/{YEARS}"
# The kind of the tasks, and the path and the sha256 of the file of each split that has one
VARIANTS: dict[str, tuple[TaskKind, dict[str, tuple[str, str]]]] = {
    "tox21": ("binary", {"train": (TOX21, "48b34e4e59a2bae6f95734cd206c1869ab355f50a5e50bb7371a21f861d5e297")}),
    "toxcast": ("binary", {"train": (TOXCAST, "56041515e0bb63c1787a26ecdbeb2bd7ae1f538681caa1b03f768853cf81b1a7")}),
    "chembl": (
        "regression",
        {
            "train": (f"{CHEMBL}_train.csv.gz", "fe7282af9f2ab8e62382abc2dac889c6505b2935d5cee6a39497365028be1a22"),
            "val": (f"{CHEMBL}_valid.csv.gz", "bcf7455c1beab8145a03ca81ac27477d3256178df5aaf4d27d26232aaf83177d"),
            "test": (f"{LATEST}_test.csv.gz", "e5a421910dea251bb7be39994cf7cf0ccdcfea8154e905323f1a5161828537dc"),
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
        self.patterns, self.download, self.base_url = tasks, download, base_url
        kind, self.addresses = VARIANTS[variant]
        self.task_options = {"kind": kind, "metrics": METRICS[kind]}
        paths = {name: data_dir / "molecules" / Path(path).name for name, (path, _) in self.addresses.items()}
        options = {"columns": {SMILES: ColumnOptions(kind="molecule")}} | common
        options |= {f"{name}_path": path for name, path in paths.items() if name != "train"}
        super().__init__(paths["train"], {"all": self.task_options}, data_dir, on_invalid=on_invalid, **options)
        self.labels = []  # known with the columns, or the spec of a checkpoint

    def prepare_data(self) -> None:
        for split, path in self._files().items():
            address, sha256 = self.addresses[split]
            if not path.exists():
                fetch(f"{self.base_url.rstrip('/')}/{address}", path, sha256, self.download)

    def load(self) -> tuple[DataSpec, dict[str, Batch | StreamedRows]]:
        split = next(iter(self._files()))
        columns = [name for name in self.open(split).columns if name != SMILES]
        patterns = dict.fromkeys(self.patterns, self.task_options)
        tasks = expand_patterns(patterns, columns, {NUMBER, *self.ignore}, str(self.paths[split]))
        self.labels = self.make_labels(tasks)
        targets = {label.column for label in self.labels}
        self.ignore = [*self.ignore, *(name for name in columns if name not in (*targets, *self.ignore))]
        return super().load()

    def _keep_labels(self, spec: DataSpec) -> None:
        self.labels = self.labels or self.make_labels(dict.fromkeys(spec.task_names, self.task_options))
        super()._keep_labels(spec)
