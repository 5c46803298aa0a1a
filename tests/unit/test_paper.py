"""Tables of publications: what their files say, and that train.py accepts every run."""

from __future__ import annotations

import copy
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig

from mtl.checks import InputError
from mtl.cli import reproduce
from mtl.config.build import build_network
from mtl.paper.definition import Paper, read
from mtl.python.fit import own_hydra
from mtl.tune.definition import Definition
from mtl.tune.space import distributions, write_overrides
from mtl.types import Categorical, DataSpec, Numeric, TaskSpec
from tests.conftest import ROOT
from tests.integration.helpers import accepted, composed
from tests.integration.test_tune import end

PAPERS = sorted((ROOT / "conf" / "paper").glob("*.yaml"))


@cache
def composed_file(name: str, own: tuple[str, ...]) -> DictConfig:
    with own_hydra():
        return hydra.compose("reproduce", [f"paper={name}", *own])


def paper(name: str, *own: str, options: list[str] | None = None, only: str | None = None, **more: str) -> Paper:
    cfg = copy.deepcopy(composed_file(name, own))
    cfg.only = only
    cfg.update(more)
    return read(cfg, name, options or [])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_every_file_describes_itself_and_train_accepts_its_runs(path: Path, every: bool) -> None:
    text = path.read_text()
    assert text.startswith("# @package _global_\n# ")
    assert f"Example: mtl reproduce {path.stem}" in text.splitlines()[1]
    for scale in ("paper", "laptop", "smoke"):
        found = paper(path.stem, scale=scale)
        assert all((found.file.title, found.file.source, found.scale.note))
        assert all(found.stages())
        rows = found.rows()
        assert len({found.setting(row).name for row in rows}) == len(rows)
        for row in rows if every else rows[-1:]:
            searched = bool(found.space_of(row))
            own = found.search(row) if searched else found.setting(row)  # a search has the words of the runs
            values = {key: end(d, first=False) for key, d in distributions(found.space_of(row)).items()}
            assert accepted([*own.overrides, *write_overrides(values)]).monitor.startswith("val/")
    assert found.count == len(rows)  # one run of each at the last scale


@pytest.mark.parametrize(("name", "most"), [("mt_tag", 19), ("networks", 11), ("dselect_k_static", 4)])
def test_smoke_has_each_group_each_method_and_what_they_continue(name: str, most: int) -> None:
    found, whole = paper(name, scale="smoke"), paper(name, scale="laptop")
    keys = {row.key for row in found.rows()}
    for place in (0, 1):
        assert {key[place] for key in keys} == {row.key[place] for row in whole.rows()}
    assert len(keys) == found.count == most
    referred = [set(found.references(row).values()) for row in found.rows()]
    assert all(sources <= keys for sources in referred)
    assert any(referred) == (name == "mt_tag")


def test_runs_and_their_words() -> None:
    found = paper("comet_movielens", scale="laptop", only="alpha_09,hash,comet", options=["data.max_rows=3000"])
    assert [row.key for row in found.rows()] == [("alpha_09", "hash"), ("alpha_09", "comet")]
    row = found.rows()[1]
    search, runs = found.search(row), found.setting(row, ["gate.gamma=5"], 7)
    assert search.name == "comet_movielens/laptop/alpha_09/comet/search"
    assert runs.name == "comet_movielens/laptop/alpha_09/comet/trial_7"
    assert runs.label == "alpha_09/comet/trial_7"
    assert set(search.space) == {"optimizer.lr", "gate.gamma", "gate.entropy_weight"}
    assert "recipe.max_epochs=12" in search.overrides
    assert "recipe.max_epochs=20" in runs.overrides
    assert {"gate=comet", "gate.gamma=5", "data.alpha=0.9", "experiment=movielens_comet"} <= set(runs.overrides)
    assert "data.max_rows=3000" in search.overrides
    assert "data.max_rows=3000" in runs.overrides
    assert found.published()["alpha_09"]["comet"]["test/loss"] == pytest.approx((0.4076, 0.0002))


def test_numbers_of_runs_and_those_of_three_batches() -> None:
    counts = {scale: paper("dselect_k_static", scale=scale).count for scale in ("smoke", "laptop", "paper")}
    assert counts == {"smoke": 4, "laptop": 16 * (10 + 9), "paper": 16 * (100 + 720)}
    assert paper("comet_digits", scale="paper").count == 6 * 500  # the rows are the best of them
    found = paper("comet_movielens", scale="smoke", options=["trainer.limit_train_batches=2"])
    words = found.setting(found.rows()[0]).overrides
    assert {"trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_test_batches=3"} <= {*words}


def test_what_a_scale_fixes_is_not_searched() -> None:
    spaces = {}
    for scale in ("paper", "laptop"):
        found = paper("dselect_k_static", scale=scale)
        spaces[scale] = set(found.space_of(found.rows()[0]))
    assert spaces["laptop"] == {"gate.gamma", "gate.entropy_weight"}
    assert spaces["paper"] - spaces["laptop"] == {"optimizer.lr", "recipe.max_epochs"}


def test_a_claim_is_repeated_for_its_groups_and_columns() -> None:
    claims = {claim.text: claim for claim in paper("networks", scale="laptop").file.claims}
    same = {"column": "test/loss", "method": "cgc_softmax", "than": ["mmoe_softmax"]}
    for group, name in {"movielens": "MovieLens", "visits": "example table"}.items():
        claim = claims[f"CGC has a smaller loss than MMoE, {name}."]
        assert claim.model_dump(exclude_defaults=True) == {"text": claim.text, "group": group} | same
    claims = {claim.text: claim for claim in paper("comet_bert", scale="laptop").file.claims}
    assert claims["COMET-BERT+ is better than MoEBERT on SQuAD 2.0 (F1)."].column == "SQuAD_F1"
    assert len(claims) == 14


NO_SEEDS = ["scales.laptop.n_trials=0", "~scales.laptop.seeds", "+scales.laptop.best=3"]
WRONG: list[tuple[list[str], list[str], str | None, str]] = [
    (["+scales.laptop.best=3"], [], None, "scales.laptop: must have either seeds or best"),
    (NO_SEEDS, [], None, "best: nothing is searched for dselect_k, "),
    ([], [], "16_tasks,tree", "only=16_tasks,tree: dselect_k_static has the groups 16_tasks, "),
    (["+scales.laptop.runs=3"], [], None, "scales.laptop.runs: no such option"),
    (["scale=paper"], ["optimizer.lr=1"], None, "optimizer.lr=1: dselect_k_static searches this option"),
    (["+claims=[{text: x, group: no, column: y, method: comet}]"], [], None, "claims: no is none of 16_tasks, "),
    (
        ["+claims=[{text: x, groups: [16_tasks], column: y, method: comet}]"],
        [],
        None,
        "groups of a claim must be as {GROUP: WORDS}",
    ),
    (["+published.values.no.comet={x: 1}"], [], None, "published.values: no is none of 16_tasks, "),
]


@pytest.mark.parametrize(("own", "options", "only", "message"), WRONG)
def test_a_wrong_option_is_one_message(own: Any, options: Any, only: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        definitions(paper("dselect_k_static", *own, options=options, only=only))


def test_groups_and_methods_that_have_no_row_in_common_are_one_message() -> None:
    with pytest.raises(InputError, match="only=cglue,single: none of these groups has one of these methods"):
        paper("mt_tag", only="cglue,single")


def definitions(found: Paper) -> list[Definition]:
    return [found.search(row) for row in found.rows()]


@pytest.mark.slow
def test_networks_are_compared_at_equal_numbers_of_parameters() -> None:
    """Without embeddings, which only the tables of data decide."""
    found, tasks = paper("networks", scale="laptop"), [TaskSpec("a", "binary"), TaskSpec("b", "regression")]
    inputs = {"movielens": {"user": Categorical(9), "movie": Categorical(9)}}
    inputs["visits"] = {**{str(column): Categorical(9) for column in range(4)}, "age": Numeric(1)}
    for group in found.groups:
        counts = {}
        for row in found.rows_of(group):
            cfg = composed(found.setting(row).overrides)
            network = build_network(cfg, DataSpec(inputs[group.key], tasks))
            counts[row.method.key] = sum(
                p.numel() for name, p in network.named_parameters() if "embeddings" not in name
            )
        assert max(counts.values()) <= 1.05 * min(counts.values()), counts


PAGES = [path for path in sorted((ROOT / "benchmarks" / "accuracy").glob("*.md")) if "\nScale " in path.read_text()]
OLDER = "dselect_k_static_25_epochs"  # the page of an earlier file, as it says


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != OLDER], ids=lambda page: page.stem)
def test_pages_have_the_claims_of_their_files_as_their_runs_tell(page: Path, tmp_path: Path) -> None:
    for name in (page.name, f"{page.stem}.csv", "rules.md"):
        shutil.copy(page.with_name(name), tmp_path)
    names = [path.stem for path in (ROOT / "conf" / "paper").glob("*.yaml") if page.stem.startswith(path.stem)]
    [scale] = re.findall(r"^Scale (\w+):", page.read_text(), flags=re.MULTILINE)
    reproduce.main([max(names, key=len), f"scale={scale}", f"judge={tmp_path / page.name}"])
    assert (tmp_path / page.name).read_text() == page.read_text()
