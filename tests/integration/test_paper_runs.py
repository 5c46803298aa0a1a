"""The runs of every table of a paper give the numbers that its claims and its columns are about."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtl.cli.run import run
from mtl.report.runs import read_named_runs
from tests.integration.helpers import compose_small
from tests.integration.test_configs import SMALL_OMNIGLOT
from tests.unit.test_paper import PAPERS, paper

ALIKE = {
    f"comet_{name}" for name in ("books", "jester", "celeba", "digits", "multi_fashion")
}  # the other comet_* suffice
NAMES = [pytest.param(path.stem, marks=pytest.mark.slow) if path.stem in ALIKE else path.stem for path in PAPERS]
TINY_TEXT = [
    "network.pretrained=null",
    "data.tokenizer=null",
    "network.config={hidden_size: 16}",
    "data.vocabulary=200",
]
NEEDS = {"routing_omniglot": SMALL_OMNIGLOT, "glue_experts": TINY_TEXT}  # what keeps a run short


@pytest.mark.parametrize("name", NAMES)
def test_runs_have_the_numbers_of_the_claims(name: str, tmp_path: Path, tiny_data: Path) -> None:
    found = paper(name, "scale=laptop")
    claims = found.file.claims
    groups, gates = ({part.key: part for part in parts} for parts in (found.groups, found.gates))
    small = [*NEEDS.get(name, []), f"paths.data_dir={tiny_data}", "trainer.max_epochs=1"]
    small += ["trainer.limit_train_batches=2"]
    known: set[str] = set()
    needed: dict[tuple[str, str], set[str]] = {}  # by gate and group, a group for each of the gate's columns
    for (key, column), group in {(claim.gate, claim.column): claim.group for claim in claims}.items():
        needed.setdefault((key, group), set()).add(column)
    for (key, group), own in needed.items():
        words, folder = found.definition(groups[group], gates[key], chosen=[]).words, tmp_path / key / group
        run(compose_small(folder, *words, *small))
        columns = set(read_named_runs({folder: (key, 0)}).table.columns)
        assert own <= columns
        known |= columns
    assert set(found.file.columns) <= known
