"""The words and flags of mtl train, tune, share and reproduce, which are read in one way."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from mtl.checks import InputError
from mtl.cli import main, reproduce, share, train, tune
from mtl.cli.command_line import read_line
from mtl.cli.study import start
from mtl.config.compose import CONF, composed, opened, split_overrides, with_default_recipe
from mtl.config.early import check_early
from mtl.config.patterns import with_columns
from mtl.pipeline.next_commands import next_commands
from mtl.runs.caller import Caller
from mtl.runs.commands import CommandLine, config_dirs


def test_flags_and_words_in_any_order(tmp_path: Path) -> None:
    given = ["gate=topk", "--config-dir", str(tmp_path), "~logger", "-m", "seed=-1,2", f"--config-dir={tmp_path}/x/.."]
    (tmp_path / "x").mkdir()
    line = read_line(given)
    assert line.overrides == ["gate=topk", "~logger", "seed=-1,2"]
    assert line.folders() == [str(tmp_path), str(tmp_path)]
    assert (line.arguments, line.multirun, line.help, line.cfg) == (given, True, False, None)
    line = read_line(["--cfg", "job", "--resolve", "--package", "gate", "--help"])
    assert (line.cfg, line.resolve, line.package, line.help) == ("job", True, "gate", True)


@pytest.mark.parametrize("name", ["train", "tune", "share", "reproduce"])
def test_flags_that_may_be_repeated_all_count(name: str, tmp_path: Path) -> None:
    folders = [str(tmp_path / "a, b"), str(tmp_path / "c")]
    for folder in folders:
        Path(folder).mkdir()
    given = ["--trust", "mine", "trust=[ours]", "--trust", "yours", "hydra.searchpath=[pkg://x]"]
    line = read_line([*given, *(word for folder in folders for word in ("--config-dir", folder))], name)
    assert line.overrides == ["trust=[ours,mine,yours]"]
    assert line.searched == [*(f"file://{folder}" for folder in folders), "pkg://x"]
    assert read_line(config_dirs(line.searched), name).searched == line.searched


def test_runs_of_a_study_get_all_folders_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two words that set one option, the last one counts, so all are in one."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / name / "gate").mkdir(parents=True)
        (tmp_path / name / "gate" / f"{name}.yaml").write_text("_target_: mine.Gate\n")
    found: list[DictConfig] = []

    def run(words: Sequence[str]) -> None:
        _, others = split_overrides(words, tune.OWN)
        found.extend(composed([f"gate={name}", *others]) for name in ("first", "second"))

    start("tune.yaml", "", run, ["--config-dir=first", "--trust=a", "n_trials=3", "--config-dir=second", "--trust=b"])
    assert [(cfg.gate, cfg.trust) for cfg in found] == [({"_target_": "mine.Gate"}, ["a", "b"])] * 2


def test_a_run_and_a_file_to_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Sequence[str]] = []
    monkeypatch.setattr(train, "main", found.append)
    main.main(["evaluate", "my run", "new rows.csv", "seed=1"])
    main.main(["evaluate", "evaluate=run", "data.path=rows.csv"])
    quoted = ["evaluate='my run'", "data.test_path='new rows.csv'", "seed=1"]
    assert found == [quoted, ["evaluate=run", "data.path=rows.csv"]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["run", "s3://b/day=1/x.csv"], ["evaluate=run", "data.test_path='s3://b/day=1/x.csv'"]),
        (["outputs/lr=1", "sets/day=1/x.csv"], ["evaluate='outputs/lr=1'", "data.test_path='sets/day=1/x.csv'"]),
        (["lr=2", "x.csv"], ["evaluate='lr=2'", "data.test_path=x.csv"]),  # a folder of this name exists
        (["--trust", "p", "run", "x.csv"], ["--trust", "p", "evaluate=run", "data.test_path=x.csv"]),
        (["--config-dir=c", "run", "--trust", "p"], ["--config-dir=c", "evaluate=run", "--trust", "p"]),
        (["seed=1", "run", "+x.y=2", "x.csv"], ["seed=1", "evaluate=run", "+x.y=2", "data.test_path=x.csv"]),
        (["evaluate=run", "x.csv", "hydra/output=a"], ["evaluate=run", "data.test_path=x.csv", "hydra/output=a"]),
    ],
)
def test_run_and_file_are_told_from_options_and_flags(
    given: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=2").mkdir()
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(train, "main", calls.append)
    main.main(["evaluate", *given])
    assert calls == [words]
    with pytest.raises(SystemExit, match="give a run"):
        main.main(["evaluate", "--trust", "p", "seed=1"])


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.tsv", "rows.parquet"])
def test_a_finished_run_says_how_to_predict_every_format(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    data = SimpleNamespace(source_files=lambda: {"data.path": tmp_path / name}, labelled=min)
    cfg = OmegaConf.create({"choices": {}, "data": {"path": None}})
    commands = next_commands(cfg, data, Path("outputs/run"), Caller(), 1.0)
    assert commands[0].endswith(f" predict outputs/run {tmp_path / name}")


SEARCHES = [  # the gates, the seconds of the run, the trials of each gate, all runs and their time
    ("comet", 7.0, 30, "31 runs, one of each gate with the defaults; at least 3.6 minutes"),
    (None, 60.0, 29, "60 runs, one of each gate with the defaults; at least 60 minutes"),
    ("comet", 150.0, 23, "24 runs, one of each gate with the defaults; at least 60 minutes"),
    (None, 7200.0, 10, "22 runs, one of each gate with the defaults; at least 44 hours"),
]


@pytest.mark.parametrize(("gate", "seconds", "trials", "time"), SEARCHES)
def test_a_finished_run_proposes_a_search_and_says_how_long_it_takes(
    gate: str | None, seconds: float, trials: int, time: str
) -> None:
    data = SimpleNamespace(source_files=lambda: {"data.path": Path("visits.csv")}, labelled=min)
    overrides = ["data=table", "data.path=visits.csv", "recipe=table_quick", "time_limit=60"]
    config: dict[str, Any] = {"choices": {"gate": gate, "data": "table"}, "data": {"path": "visits.csv"}}
    resumed = Caller(CommandLine(overrides=["ckpt=RUN"]), local=["data.data_dir=x"])
    *_, command, comment = next_commands(
        OmegaConf.create(config | {"overrides": overrides}), data, Path("run"), resumed, seconds
    )
    searched = f"gate={gate or 'softmax,comet'} n_trials={trials}"
    kept = "data=table data.path=visits.csv time_limit=60 data.data_dir=x"
    assert command.endswith(f"tune study=table name=run {searched} {kept}")
    assert comment == f"# {time}, since many take longer than this run"
    config |= {"overrides": ["data=table"]}  # whose path was in a file of the user's
    assert not any("tune" in line for line in next_commands(OmegaConf.create(config), data, Path("run"), resumed, 1.0))


def test_a_file_of_the_user_that_is_not_searched_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my conf", "data").mkdir(parents=True)
    Path("my conf", "data", "orders.yaml").write_text("defaults: [table]\n")
    message = r"^error: data=orders: to use my conf/data/orders\.yaml, add --config-dir 'my conf'$"
    with pytest.raises(SystemExit, match=message):
        train.main(["data=orders"])
    with pytest.raises(SystemExit, match=r"^error: data=order: no such data"):
        train.main(["data=order"])


def test_options_of_a_study_may_have_a_prefix() -> None:
    words = ["++n_trials=5", "study=table", "+gate=topk", "++optimizer.lr=2", "n_trials=4"]
    assert split_overrides(words, tune.OWN) == (["n_trials=4", "study=table"], ["+gate=topk", "++optimizer.lr=2"])
    assert split_overrides(["~logger", "+logger=csv"], tune.OWN) == ([], ["~logger", "+logger=csv"])
    with pytest.raises(InputError, match="each run has a folder of its own"):
        split_overrides(["++paths.run_dir=x"], tune.OWN)
    with pytest.raises(SystemExit, match=r"\+\+paths.run_dir=x: each run of a sweep has a folder"):
        train.main(["-m", "seed=1,2", "++paths.run_dir=x"])


def test_references_that_cannot_be_resolved_are_left_to_the_run() -> None:
    check_early(OmegaConf.create({"ckpt": "${nothing}", "evaluate": "${oc.env:NOTHING}", "data": {}}))


def test_a_pattern_of_tasks_may_have_a_dot() -> None:
    """Names of tasks have none, but the dots of the columns that it stands for are replaced."""
    data = {"_target_": "mtl.data_modules.table.TableDataModule", "tasks": {"assay.*": "regression"}}
    check_early(OmegaConf.create({"data": data}))


def test_reproduce_alone_lists_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce.main([])
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines if re.match("  [a-z]", line)]
    assert shown == sorted(path.stem for path in (CONF / "paper").glob("*.yaml"))
    assert re.search(r"Runs:\s+smoke 6, laptop 18,\s+paper 3,000", "\n".join(lines))  # comet_digits
    assert "laptop 128 (2.7 h)" in " ".join(" ".join(lines).split())  # gates
    assert not any("Example" in line or len(line) > 80 for line in lines)


@pytest.mark.parametrize("flag", ["--in-fo", "-cn", "-cp", "--shell-completion", "--config-name=x", "-x=1"])
def test_unknown_flag_gives_one_message(flag: str) -> None:
    for run, name in ((train.main, "train"), (share.main, "share")):
        with pytest.raises(SystemExit, match=f"^error: {flag}: no such flag; mtl {name} --help lists all$"):
            run(["seed=1", flag])
        with pytest.raises(SystemExit, match=r"^error: --seed: .* write seed=VALUE; mtl "):
            run(["--seed", "1"])
    with pytest.raises(InputError, match="--config-dir nowhere: no such folder"):
        read_line(["--config-dir", "nowhere"])
    with pytest.raises(InputError, match=r"trust=5: must be a list, as in trust=\[...\]"):
        read_line(["trust=5", "--trust", "mine"])


def test_configuration_is_printed_with_files_and_packages_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "mine.yaml").write_text("a: ${seed}\n")
    given = ["--config-dir", str(tmp_path), "--trust", "mine", "gate=mine", "--resolve", "--cfg", "job", "--package"]
    for section, text in (("trust", "- mine\n"), ("gate", "a: 0\n")):
        train.main([*given, section])
        assert capsys.readouterr().out == f"# @package {section}\n{text}"


def test_a_sweep_cannot_have_one_run_folder() -> None:
    with pytest.raises(SystemExit, match=r"paths.run_dir=x: each run of a sweep has a folder of its own"):
        train.main(["-m", "seed=1,2", "paths.run_dir=x"])


def test_patterns_of_columns_on_the_command_line() -> None:
    with opened():
        cfg = composed(["data=table", "data.path=x.csv", "data.tasks={genre_*: binary, seen: regression}"])
    with_columns(cfg, ["genre_a", "genre_b.1", "seen", "age"])
    genre = {"kind": "binary", "pattern": "genre_*"}
    expanded = {"genre_a": {**genre, "column": "genre_a"}, "genre_b_1": {**genre, "column": "genre_b.1"}}
    assert cfg.data.tasks == {**expanded, "seen": "regression"}


def test_a_pattern_leaves_columns_with_another_role() -> None:
    words = ["data=table", "data.path=x.csv", "data.ignore=[id]", "data.columns={bits: list, ab: {format: '1.234,5'}}"]
    words += ["data.split.by=column", "data.split.column=part", "data.group_column=user", "data.weight_column=w"]
    words += [
        "data.slices=[city]",
        "data.tasks={third: {kind: binary, column: 3}, a*: {kind: regression, weight_column: aw}, *: binary}",
    ]
    with opened():
        cfg = composed(words)
        twice = composed(words)
    with_columns(cfg, ["id", "bits", "part", "ab", "b", "3", "user", "w", "city", "aw"])
    assert list(cfg.data.tasks) == ["third", "ab", "b"]
    assert cfg.data.tasks.ab.kind == "regression"  # the first pattern counts
    with pytest.raises(InputError, match=r"data.tasks.\*: columns 'b.1' and 'b_1' would be one task; name one by"):
        with_columns(twice, ["ab", "b.1", "b_1"])


@pytest.mark.parametrize(
    ("words", "said"),
    [(["train"], True), (["train", "gate=comet"], True), (["train", "--help"], False), (["reproduce"], False)],
)
def test_a_terminal_is_told_why_nothing_happens_at_first(
    words: list[str], said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (train, reproduce):
        monkeypatch.setattr(module, "main", lambda given: None)
    main.main(words)
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main.main(words)
    assert capsys.readouterr().err == "loading PyTorch (a few seconds) ...\n" * said


@pytest.mark.parametrize(
    ("overrides", "is_quick"),
    [
        (["data=table"], True),
        (["data=table", "seed=1,2", "recipe.dropout=0.1", "optimizer.lr=1e-3", "ckpt=null", "schedule=none"], True),
        (["data=mine"], True),
        (["data=table,mine"], True),
        (["data=other"], False),  # its file chooses a recipe
        (["data=broken"], False),  # Hydra says what is wrong with it
        (["data=table,movielens"], False),
        ([], False),
        *((["data=table", word], False) for word in ("gate=comet", "recipe=table", "network=mmoe", "gate.k=4")),
        *(
            (["data=table", word], False)
            for word in ("recipe.k=4", "experts=ffn", "ckpt=RUN", "experiment=books_comet")
        ),
    ],
)
def test_a_table_has_its_recipe_where_nothing_is_chosen(overrides: list[str], is_quick: bool, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("defaults: [table, _self_]\n")
    (tmp_path / "data" / "other.yaml").write_text("defaults: [table, {override /recipe: mine}]\n")
    (tmp_path / "data" / "broken.yaml").write_text("defaults: [table\n- x: {")
    added = ["recipe=table_quick"] if is_quick else []
    assert with_default_recipe(overrides, [f"file://{tmp_path}"]) == [*overrides, *added]


@pytest.mark.parametrize(
    ("option", "recipe"),
    [
        ("data.columns.smiles=molecule", "fingerprints"),
        ("data.columns={id: category, smiles: {kind: 'molecule'}}", "fingerprints"),
        ("data.columns={molecule: category}", "table_quick"),
        ("data.columns.molecule=text", "table_quick"),
    ],
)
def test_molecules_have_a_recipe_of_their_own(option: str, recipe: str) -> None:
    assert with_default_recipe(["data=table", option]) == ["data=table", option, f"recipe={recipe}"]
    assert with_default_recipe(["data=table", option, "gate=comet"]) == ["data=table", option, "gate=comet"]
    assert with_default_recipe(["data=table", option, "recipe.ensemble=3"])[-1] == f"recipe={recipe}"


def test_a_run_that_starts_from_another_recipe_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    overrides = ["data=table", f"start_from={tmp_path}"]
    quick = ["recipe=table_quick"]
    for choices, added in (({"recipe": "table_quick"}, quick), ({"recipe": "table"}, []), (["forged"], quick)):
        (tmp_path / "command.json").write_text(json.dumps({"choices": choices}))
        assert with_default_recipe(overrides) == [*overrides, *added]
