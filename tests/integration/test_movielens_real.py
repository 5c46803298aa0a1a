"""MovieLens on the published files, where they are: $MTL_DATA_DIR or data/ in the repository. A slow test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from mtl.data_modules.movielens import VARIANTS, MovieLensDataModule

from tests.conftest import ROOT
from tests.loaded import loaded

DATA_DIR = Path(os.environ.get("MTL_DATA_DIR", ROOT / "data"))

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("negatives", ["uniform", "per_user"])
@pytest.mark.parametrize("variant", ["1m", "100k"])
def test_published_ratings(tmp_path: Path, variant: str, negatives: str) -> None:
    layout = VARIANTS[variant]
    file = DATA_DIR / layout.folder / layout.ratings
    if not file.exists():
        pytest.skip(f"{file} is not there")
    (tmp_path / layout.folder).symlink_to(file.parent.resolve())  # the cache goes beside the link
    data = loaded(
        MovieLensDataModule(str(tmp_path), batch_size=512, variant=variant, negatives=negatives, download=False)
    )

    with open(file, "rb") as lines:
        rows = sum(1 for _ in lines)
    splits = data.splits
    watched = {name: int(batch.targets["watch"].sum()) for name, batch in splits.items()}
    drawn = {name: len(batch) - watched[name] for name, batch in splits.items()}
    assert sum(watched.values()) == rows
    assert 0.95 * rows <= sum(drawn.values()) <= rows  # per_user: the keenest users leave fewer than they rated
    assert sum(drawn.values()) == rows or negatives == "per_user"
    for name, share in (("train", 0.8), ("val", 0.1), ("test", 0.1)):
        assert abs(watched[name] - share * rows) < 6
        rating = splits[name].targets["rating"]
        assert torch.equal(rating.isnan(), splits[name].targets["watch"] == 0)
        assert rating[~rating.isnan()].unique().tolist() == [1, 2, 3, 4, 5]
        assert 3.4 < float(rating.nanmean()) < 3.8
    pairs = torch.cat([batch.inputs["user"] * layout.movies + batch.inputs["item"] for batch in splits.values()])
    assert len(pairs.unique()) == len(pairs)
    assert int(max(batch.inputs["user"].max() for batch in splits.values())) == layout.users - 1
    assert int(max(batch.inputs["item"].max() for batch in splits.values())) == layout.movies - 1
