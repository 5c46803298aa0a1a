"""Columns of molecules: their bits, cells that cannot be read, salts and duplicates."""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules import molecules
from mtl.data_modules.molecules import MoleculesDataModule
from mtl.data_modules.split_rows import read_groups
from mtl.data_modules.splits import scaffold_split
from mtl.data_modules.tables.molecules import find_bits, find_scaffolds
from mtl.data_modules.tables.row_source import RowSource
from rdkit import Chem
from rdkit.Chem import rdFingerprintGenerator

from mtl.checks import InputError
from mtl.types import Bag
from tests.file_server import serving
from tests.loaded import loaded
from tests.tables import WAYS, restore_encoder, rows_of, serve_rows

RINGS = [f"{'C' * n}c1ccccc1{'C' * (n % 3)}" for n in range(20)]
CHAINS = [f"{'C' * n}O" for n in range(20)]
SMILES = RINGS + CHAINS
MOLECULE: dict[str, Any] = {"columns": {"smiles": "molecule"}}


@pytest.mark.parametrize("way", WAYS)
def test_a_molecule_is_the_list_of_its_bits(way: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = serve_rows(pl.DataFrame({"smiles": SMILES}), tmp_path, way, **MOLECULE)
    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=2048)
    expected = [{*map(str, generator.GetFingerprint(Chem.MolFromSmiles(one)).GetOnBits())} for one in SMILES]
    vocabulary = data.row_encoder.vocabularies["smiles"].values
    assert {*vocabulary} == set.union(*expected)
    ids = rows_of(data).inputs["smiles"]
    assert [{vocabulary[i - 2] for i in row if i} for row in ids.tolist()] == expected
    assert data.spec.inputs == {"smiles": Bag(len(vocabulary) + 2, max(map(len, expected)))}
    unseen = restore_encoder(data).encode(pl.DataFrame({"smiles": ["[Au]", "OCC"]}), "rows")["smiles"]
    assert unseen[0].unique().tolist() == [0, 1]
    torch.testing.assert_close(unseen[1], ids[SMILES.index("CCO")])
    assert capfd.readouterr().err == ""


def test_cells_that_are_no_molecules(tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: Any) -> None:
    frame = pl.DataFrame({"smiles": [*SMILES, "C1CC", "", "Cl.CCN", "c1cc", " CCO "]})
    match = r"column 'smiles', row 41: 'C1CC' is not a molecule in SMILES that rdkit reads; 2 of 45 cells"
    with pytest.raises(InputError, match=match):
        serve_rows(frame, tmp_path, "csv", **MOLECULE)
    data = serve_rows(frame, tmp_path, "csv", **MOLECULE, on_invalid="missing")
    [warning] = [record.message for record in caplog.records if "C1CC" in record.message]
    assert warning.endswith("It and 5 other cells of this column are treated as missing (data.on_invalid=missing)")
    *_, bad, empty, salt, worse, alcohol = rows_of(data).inputs["smiles"]
    assert not torch.stack([bad, empty, worse]).any()
    torch.testing.assert_close(alcohol, rows_of(data).inputs["smiles"][SMILES.index("CCO")])
    bits, parts = (set(find_bits(pl.Series([*texts])).explode()) for texts in (["Cl.CCN"], ["Cl", "CCN"]))
    assert bits == parts
    assert len(bits) == (salt > 0).sum()
    assert "Parse Error" not in capfd.readouterr().err


def test_molecules_of_a_scaffold_are_in_one_split(tmp_path: Path) -> None:
    scaffolds = find_scaffolds(pl.Series(["CCc1ccccc1", "OCC", "C1CC1CO", "C1CC", None]))
    assert scaffolds.to_list() == ["c1ccccc1", "", "C1CC1", None, None]
    groups = torch.tensor([0, 1, 1, 2, 3, 3, 3, 4, 5, 5])  # of 3, 2, 2, 1, 1 and 1 rows
    parts = scaffold_split(groups, {"train": 0.6, "val": 0.2, "test": 0.2})
    assert {name: part.tolist() for name, part in parts.items()} == {
        "train": [4, 5, 6, 7, 8, 9],  # scaffold 1 is as large as 5, which has later rows
        "val": [1, 2],
        "test": [0, 3],
    }
    with pytest.raises(InputError, match=r"column 'smiles': data.split.by=scaffold needs molecules; no cell is one"):
        read_groups(RowSource.of_frames({"rows": pl.DataFrame({"smiles": ["a b", None]})}), "smiles", "scaffold")
    frame = pl.DataFrame({"smiles": [*SMILES, "C1CC1", "C1CCC1"]})
    split = {"by": "scaffold", "column": "smiles", "fractions": [0.955, 0.0225, 0.0225]}
    data = serve_rows(frame, tmp_path, "csv", **MOLECULE, split=split, val_path=None, test_path=None)
    assert data.row_info("val")["file_row"].to_list() + data.row_info("test")["file_row"].to_list() == [42, 41]


def write_site(site: Path, kind: str, splits: Mapping[str, pl.DataFrame]) -> tuple[str, dict[str, tuple[str, str]]]:
    """Write the files of a data set to ``site``, and return its kind and where they are."""
    files = {}
    for split, frame in splits.items():
        content = gzip.compress(frame.write_csv().encode(), mtime=0)
        (site / "commit").mkdir(parents=True, exist_ok=True)
        (site / "commit" / f"{kind}_{split}.csv.gz").write_bytes(content)
        files[split] = (f"commit/{kind}_{split}.csv.gz", hashlib.sha256(content).hexdigest())
    return kind, files


def test_published_molecules_are_fetched_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site, binding = tmp_path / "site", [5.5, None, 7.25, 4.0] * 10
    frame = pl.DataFrame(
        {"A-1": [0, 1, None, 1] * 10, "A.2": [1, 0] * 20, "one": 1, "mol_id": [f"M{i}" for i in range(40)]}
    )
    toxic = write_site(site / "tox21", "binary", {"train": frame.with_columns(smiles=pl.Series(SMILES))})
    bound = pl.DataFrame({"smiles": SMILES, "P1": binding})
    years = write_site(site / "chembl", "regression", {"train": bound, "val": bound[:10], "test": bound[10:]})
    monkeypatch.setattr(molecules, "VARIANTS", {"tox21": toxic, "chembl": years})

    def serve(folder: str, variant: str, url: str, **options: Any) -> Any:
        base_url = f"{url}/{variant}"
        return loaded(MoleculesDataModule(str(tmp_path / folder), variant, base_url=base_url, batch_size=8, **options))

    with serving(site) as url:
        data = serve("data", "tox21", url)
        assert [task.name for task in data.spec.tasks] == ["A-1", "A_2"]
        assert list(data.spec.inputs) == ["smiles"]
        assert data.row_counts() == {"train": 32, "val": 4, "test": 4}
        assert "1 of 3 tasks are left out" in caplog.text
        normalized = serve("data", "tox21", url, normalize_losses=True)
        assert normalized.spec.tasks[1].weight == pytest.approx(1 / math.log(2), rel=0.02)
        again = MoleculesDataModule(str(tmp_path / "data"), "tox21", batch_size=8)
        again.load_state_dict(serve("data", "tox21", url, tasks=["A-*"]).state_dict())
        rows = frame.with_columns(smiles=pl.Series(SMILES))
        assert list(again.labelled(rows, "rows").targets) == ["A-1"]
        assert serve("data", "chembl", url).row_counts() == {"train": 40, "val": 10, "test": 30}
        some = serve("data", "tox21", "http://127.0.0.1:9", tasks=["A-*"])  # the files are there
        assert (some.spec.task_names, list(some.spec.inputs)) == (["A-1"], ["smiles"])
        with pytest.raises(
            InputError, match=r"data\.tasks\.B\*: no column with such a name is left; .*binary_train\.csv\.gz"
        ):
            serve("data", "tox21", url, tasks=["B*"])
        (site / "tox21" / "commit" / "binary_train.csv.gz").write_bytes(b"other rows")
        with pytest.raises(InputError, match=r"cannot download binary_train\.csv\.gz: .*hash of downloaded file"):
            serve("new", "tox21", url)
    with pytest.raises(
        InputError, match=r"cannot download binary_train\.csv\.gz: .*Without the network, get http.*molecules"
    ):
        serve("new", "tox21", "http://127.0.0.1:9")
