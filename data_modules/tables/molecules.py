"""Read molecules, written as SMILES, by the package rdkit."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import polars as pl

from mtl.checks import require_packages

RADIUS, BITS = 2, 2048  # of fingerprints
NAMES = [str(bit) for bit in range(BITS)]  # shared, since the bits of all remembered molecules are many
MAX_REMEMBERED = 1 << 17  # molecules, so that each is read once


@cache
def _rdkit() -> tuple[Any, Any, Any]:
    """Return rdkit's reader of SMILES without its log, and its generator of fingerprints. Raises InputError."""
    require_packages("a column of molecules", "chem", "rdkit")
    from rdkit import Chem, rdBase
    from rdkit.Chem import rdFingerprintGenerator

    return Chem, rdBase.BlockLogs, rdFingerprintGenerator.GetMorganGenerator(radius=RADIUS, fpSize=BITS)


def _read(smiles: str) -> Any:
    """Return the molecule, or None."""
    chem, quiet, _ = _rdkit()
    with quiet():
        return chem.MolFromSmiles(smiles)


@lru_cache(maxsize=MAX_REMEMBERED)
def _fingerprint(smiles: str) -> tuple[str, ...] | None:
    molecule = _read(smiles)
    return None if molecule is None else tuple(NAMES[bit] for bit in _rdkit()[2].GetFingerprint(molecule).GetOnBits())


def find_bits(smiles: pl.Series) -> pl.Series:
    """Return the Morgan fingerprint (Rogers & Hahn 2010) of each molecule as a list of its bits, "0" to "2047".

    Each bit stands for the surroundings of an atom up to ``RADIUS`` bonds away. Null for a cell that is null or no
    SMILES; salts and mixtures have the bits of all their parts. Raises InputError without rdkit.
    """
    bits = [None if text is None else _fingerprint(text) for text in smiles]
    return pl.Series(smiles.name, bits, dtype=pl.List(pl.String))


def find_scaffolds(smiles: pl.Series) -> pl.Series:
    """Return the scaffold of each molecule, its rings and what links them (Bemis & Murcko 1996), as SMILES.

    "" for a molecule without rings; null for a cell that is null or no SMILES. Raises InputError without rdkit.
    """
    _rdkit()
    from rdkit.Chem.Scaffolds import MurckoScaffold

    scaffold_of: Any = MurckoScaffold.MurckoScaffoldSmiles
    molecules = (None if text is None else _read(text) for text in smiles)  # one at a time in memory
    scaffolds = [None if molecule is None else scaffold_of(mol=molecule) for molecule in molecules]
    return pl.Series(smiles.name, scaffolds, dtype=pl.String)
