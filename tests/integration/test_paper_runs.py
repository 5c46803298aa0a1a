"""The runs of every table of a paper give the numbers that its claims and its columns are about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mtl.jobs.setting import replace_references, run_folder
from mtl.paper.definition import Paper, Row
from mtl.pipeline.run import run
from mtl.report.runs import read_named_runs
from mtl.use.neurons import write_neuron_scores
from tests.integration.helpers import compose_small, narrow
from tests.integration.test_configs import SMALL_OMNIGLOT
from tests.transformers import save_encoder, save_vocabulary
from tests.unit.test_paper import PAPERS, paper

QUICK = ("comet_movielens", "dselect_k_movielens", "dselect_k_static", "mt_tag", "routing_four_mnists")  # the kinds
NAMES = [path.stem if path.stem in QUICK else pytest.param(path.stem, marks=pytest.mark.slow) for path in PAPERS]
TINY_TEXT = [
    "network.pretrained=null",
    "network.config={hidden_size: 16}",
    "data.vocabulary=200",
]
CONTINUED = {"mt_tag", "mt_tag_bert", "mt_tag_glue_plus", "comet_bert"}  # their runs start from others
NEEDS = {"routing_omniglot": SMALL_OMNIGLOT, **dict.fromkeys(("glue_experts", *CONTINUED), TINY_TEXT)}  # for short runs
NEEDS["comet_bert"] = [*TINY_TEXT, "experts.width=24", "network.shared_neurons=16"]


def columns_of(found: Paper, row: Row, folder: Path, small: Sequence[str]) -> set[str]:
    """Return the columns of a small run of a row, after those of the rows that it refers to."""
    setting = found.setting(row)
    path = run_folder(folder, setting.label, 0)
    if not path.exists():
        sources = {text: run_folder(folder, "/".join(key), 0) for text, key in found.references(row).items()}
        for key in dict.fromkeys(found.references(row).values()):
            columns_of(found, found.rows_by_key[key], folder, small)
        words = replace_references(setting.overrides, sources)
        words = [word for word in words if not word.startswith("data.rows=")]  # compose_small has few rows
        cfg = narrow(compose_small(path, *words, *small))
        if file := cfg.network.get("neuron_scores"):
            write_neuron_scores(Path(file).parent, Path(file), data_dir=cfg.paths.data_dir)
        run(cfg)
    return set(read_named_runs({path: (setting.label, 0)}).table.columns)


@pytest.mark.parametrize("name", NAMES)
def test_runs_have_the_numbers_of_the_claims(name: str, tmp_path: Path, tiny_data: Path) -> None:
    found = paper(name, scale="laptop")
    small = [f"paths.data_dir={tiny_data}", "trainer.max_epochs=1", "trainer.limit_train_batches=2"]
    if name in NEEDS:
        small = [*NEEDS[name], *small]
    if name in CONTINUED:  # a vocabulary of its own would not fit the run that is continued
        save_encoder(tmp_path / "bert", "bert")  # its configuration says what the vocabulary is for
        small += [f"data.tokenizer={save_vocabulary(tmp_path / 'bert')}"]
    needed: dict[tuple[str, str], set[str]] = {}  # by group and method, a group for each of the method's columns
    own = [claim for claim in found.file.claims if claim.group not in found.file.tables]
    for (key, column), group in {(claim.method, claim.column): claim.group for claim in own}.items():
        needed.setdefault((group, key), set()).add(column)
    for table in found.file.tables.values():
        for column, group in {column: group for group, column in table.columns.values()}.items():
            needed.setdefault((group, table.methods[-1]), set()).add(column)
    wanted, known = set(found.file.columns) - {"test/delta_m"}, set[str]()  # that one comes from several runs
    others = {row.group.key: row.key for row in found.rows()}.values()
    for pair in [*needed, *others]:  # a column may be of groups without claims
        if pair in needed or not wanted <= known:
            have = columns_of(found, found.rows_by_key[pair], tmp_path, small)
            assert needed.get(pair, set()) <= have
            known |= have
    assert wanted <= known
