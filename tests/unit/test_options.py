"""What options accept: of the composed configuration, of constructors, and of the words of a command line."""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NotRequired

import pytest
from hydra import compose
from mtl.data_modules.text import TextDataModule
from omegaconf import DictConfig, OmegaConf
from typing_extensions import TypedDict

from mtl.checks import InputError, format_value
from mtl.config import build, resolvers
from mtl.config.check import check, find, options
from mtl.config.hydra_errors import explain
from mtl.files.escaping import escape_interpolation, unescape_interpolation
from mtl.options import Address, Count, FilePath, Fraction, Positive, TaskName, adapter, fits, valid
from mtl.python.fit import own_hydra
from tests.conftest import ROOT
from tests.integration.helpers import compose_small

resolvers.register()
NAN, INF = math.nan, math.inf
PERMUTED = "gate=topk permutation=sinkhorn"
ROUTED = "network=routed_omniglot gate=gumbel_matrix"
IMAGES = "data=multi_mnist"


@cache
def composed(words: str) -> DictConfig:
    return compose_small(Path("outputs/test"), *words.split())


def configuration(words: str = "", values: Mapping[str, Any] | None = None) -> DictConfig:
    """Return a copy of the configuration that ``words`` give, with ``values`` by dotted name."""
    cfg = copy.deepcopy(composed(words))
    for key, value in (values or {}).items():
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    return cfg


def answer(cfg: DictConfig, words: Sequence[str] = ()) -> str:
    with pytest.raises(InputError) as caught:
        check(cfg, words)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 1000
    return message


def cases(*rows: tuple[str, Sequence[Any], str]) -> list[Any]:
    """Return a case for each value of each row (option, values, words of the message)."""
    return [
        pytest.param(key, value, words, id=f"{key}={format_value(value)}")
        for key, values, words in rows
        for value in values
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    cases(
        ("seed", [-1, True, 1.5, "abc", None, 2**32, [1], {"a": 1}], "seed=.*: must be "),
        ("run_name", [None, 5, "", " ", "a" * 300, "a/b", "a\nb", "\udc80"], "run_name="),
        ("test_checkpoint", ["foo", None, True], "must be 'best' or 'last'"),
        ("compile", ["maybe", 1, None], "must be a valid boolean"),
        ("recipe", [5, None, "abc", []], "recipe=.*must be a section"),
        ("recipe.num_experts", [10**12, 0, "abc", 2.5, True, None, 10**400], "recipe.num_experts=.*: must be "),
        ("recipe.expert_units", [4], "recipe.expert_units=4: must be a list"),
        ("recipe.expert_units", [["abc"], [0], [True], [[4]], [None], [4, -1]], r"expert_units\[[01]\]="),
        ("recipe.dropout", ["abc", 1, NAN, -0.1, True, None, INF], "recipe.dropout=.*: must be"),
        ("data", [None, 5, "abc", []], "data=.*section with _target_"),
        ("gate.k", [[1], 0, "two", 1.0], "gate.k=.*: must be"),
        ("gate.gamma", [INF, 0, True, None], "gate.gamma=.*: must be"),
        ("gate.gama", [1], "gate.gama: CometGate has no option gama; did you mean gamma"),
        ("gate._target_", ["mtl.gates.CommetGate"], "'mtl.gates' has no attribute 'CommetGate'"),
        ("network._target_", ["builtins.dict"], "network._target_: must name a mtl.MultiTaskNetwork, or a function"),
        ("gate._target_", ["mtl..gates", ".", "a b", 5, None, "", ["a"]], "gate._target_="),
        ("optimizer.lr", [True, NAN, INF, -1, 0, "abc", None, [1]], "optimizer.lr=.*: must be"),
        ("trainer.devices", [1.5, True, None], "trainer.devices"),
        ("trainer.precision", [17, "float", True], "trainer.precision=.*32-true"),
        ("trainer.val_check_interval", [0, -1, 1.5], "trainer.val_check_interval"),
        ("callbacks.best", [5, "abc", True], "callbacks.best=.*or null"),
        ("unknown.section", [1], "unknown: there is no such section"),
    ),
)  # fmt: skip
def test_wrong_values_get_one_sentence(key: str, value: Any, message: str) -> None:
    assert re.search(message, answer(configuration("", {key: value})))


@pytest.mark.parametrize(
    ("words", "key", "value", "message"),
    [
        ("gate=fixed", "gate.weights", [["a"]], "gate.weights[0][0]=a"),
        ("gate=hash data=movielens", "gate.input_name", 5, "gate.input_name=5: must be text"),
        (PERMUTED, "callbacks.permutation_tau.end", "abc", "callbacks.permutation_tau.end=abc: must be"),
        (ROUTED, "network.layers.0.copies", 0, "network.layers[0].copies=0"),
        (ROUTED, "network.layers.0.copy", 2, "network.layers[0].copy: no such option"),
        (ROUTED, "network.layers.0.components.0.kernels", [[1, 2, 3]], "network.layers.0.components.0.kernels[0]"),
        (IMAGES, "recipe.convolutions", [{"channels": 4}], "kernel is missing"),
        ("trainer=ddp_cpu", "trainer.devices", 1000, "only slow each other down"),
        ("trainer=ddp_cpu", "trainer.strategy.find_unused_parameters", "x", "must be a valid boolean"),
        ("logger=csv", "logger.csv.flush_logs_every_n_steps", 0, "logger.csv.flush_logs_every_n_steps=0"),
    ],
)  # fmt: skip
def test_wrong_values_of_other_choices(words: str, key: str, value: Any, message: str) -> None:
    assert message in answer(configuration(words, {key: value}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe.k": "${nothing}"}, "recipe.k: Interpolation key 'nothing' not found"),
        ({"recipe.k": "${recipe.num_expert}"}, "'recipe.num_expert' not found; did you mean recipe.num_experts?"),
        ({"recipe.k": "${recipe.k}"}, "recipe.k: Recursive interpolation"),
        ({"recipe.comet": "${recipe}"}, "recipe.comet: Interpolation to parent node"),
        ({"recipe.k": "${oc.env:MTL_NOT_SET}"}, "Environment variable"),
        ({"recipe.k": "${thing:1}"}, "Unsupported interpolation type thing"),
        ({"recipe.k": "???"}, "recipe.k is missing; give recipe.k=..."),
        ({"run_name": r"\${recipe.k}"}, r"run_name=${recipe.k}: write $\{ for ${"),
        ({"gate": "${nothing}"}, "'nothing' not found"),
    ],
)  # fmt: skip
def test_references_that_lead_nowhere(values: dict[str, Any], message: str) -> None:
    assert message in answer(configuration("", values))


@pytest.mark.parametrize("section", ["data", "trainer"])
def test_sections_that_the_command_line_leaves_out(section: str) -> None:
    cfg = configuration()
    OmegaConf.set_struct(cfg, False)
    del cfg[section]
    assert f"choose one with {section}=NAME" in answer(cfg)


def test_a_message_names_the_place_where_the_value_is_written() -> None:
    message = answer(configuration("", {"recipe.k": "abc"}))
    assert message.startswith("recipe.k=abc: must be")
    assert "gate.k" not in message


def test_several_problems_are_one_message() -> None:
    values = {"seed": -1, "test_checkpoint": "foo", "gate.gama": 1, "recipe.dropout": 2, "compile": "maybe"}
    message = answer(configuration("", values))
    assert re.search(r"; and \d more$", message)
    assert "seed=-1" in message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("elsewhere", 3, "elsewhere: there is no such section or option, and nothing refers to it"),
        ("recipe.num_expert", 3, "recipe.num_expert: nothing refers to it; did you mean recipe.num_experts?"),
        ("recipe.width", 3, "recipe.width: nothing reads this option; leave it out"),
        ("recipe.batch", {"batch_size": 3}, "recipe.batch: nothing reads this option"),
        ("recipe.comet.k", 3, "recipe.comet.k: nothing reads this option; leave it out"),
        ("paths.cache", "/tmp", "paths.cache: nothing reads this option; leave it out"),
        ("gate.more", 3, "gate.more: CometGate has no option more"),
    ],
)
def test_an_option_that_nothing_reads_is_answered(key: str, value: Any, message: str) -> None:
    assert answer(configuration("", {key: value}), [f"+{key}=..."]).startswith(message)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sizes": {"units": [4]}, "experts.units": "${sizes.units}"}, ["+sizes.units=[4]"]),
        ({"recipe.mine": 0.25, "recipe.dropout": "${oc.select:recipe.mine,0.5}"}, ["+recipe.mine=0.25"]),
        ({"callbacks.mine": None}, ["+callbacks.mine=null"]),
        ({"trainer.min_epochs": 2}, ["+trainer.min_epochs=2"]),
        ({"network.num_experts": 4}, ["++network.num_experts=4"]),
        ({"paths.run_dir": "x", "distillation.weight": 0.5}, ["++paths.run_dir=x", "++distillation.weight=0.5"]),
        ({}, ["+mine=group", "++seed=0", "+gate@recipe.x=topk"]),
    ],
)
def test_an_option_that_is_read_may_be_added(values: dict[str, Any], words: list[str]) -> None:
    check(configuration("", values), words)


def test_unused_sections_may_be_null() -> None:
    check(configuration("network=single_task", {"gate": None}))
    check(configuration("network=frozen_experts data=synthetic_recovery", {"experts": None}))
    nothing = {"permutation": None, "logger": None, "ckpt": None, "evaluate": None, "callbacks.best": None}
    check(configuration("", nothing))


@pytest.mark.parametrize(
    "values",
    [
        {"trainer.max_epochs": -1, "trainer.max_steps": 10},
        {"trainer.precision": 16},
        {"trainer.limit_train_batches": 0.5, "trainer.limit_val_batches": 2, "trainer.overfit_batches": 2},
        {"trainer.max_time": "00:12:00:00", "trainer.val_check_interval": 0.25},
        {"trainer.gradient_clip_val": 1, "trainer.gradient_clip_algorithm": "norm"},
        {"trainer.profiler": "simple", "trainer.fast_dev_run": True, "trainer.deterministic": "warn"},
        {"trainer.strategy": "ddp", "trainer.accelerator": "cpu", "trainer.num_nodes": 2},
        {"callbacks.early_stopping.patience": 0, "callbacks.last.every_n_minutes": 0.5},
        {"callbacks.early_stopping": None, "callbacks.mine": None, "callbacks.later": {"epochs": 3}},
        {"network.static_gate": True, "network.execution": "sparse"},
        {"seed": 2**32 - 1, "compile": True, "test_checkpoint": "last", "run_name": "comet+ (é)"},
        {"sizes": {"units": [4]}, "experts.units": "${sizes.units}"},  # a section of the user's own
        {"data.seed": {"_target_": "builtins.int"}},  # built later: its value is not known yet
    ],
    ids=str,
)
def test_right_values_are_accepted(values: dict[str, Any]) -> None:
    check(configuration("", values))


@pytest.mark.parametrize(
    ("key", "value"), [("devices", 0), ("max_epochs", -2), ("max_time", "abc"), ("max_time", {"fortnights": 1})]
)
def test_what_lightning_refuses_is_one_sentence(key: str, value: Any) -> None:
    cfg = configuration("logger=none callbacks.progress=null", {f"trainer.{key}": value})
    with pytest.raises(InputError, match=r"^trainer: .*"):
        build.build_trainer(cfg)


@pytest.mark.parametrize(
    ("section", "kind"), [("data", "TensorDataModule"), ("trainer", "Trainer"), ("callbacks.best", "Callback")]
)
@pytest.mark.parametrize("values", [{"_partial_": True}, {"_target_": "builtins.dict"}])
def test_a_section_that_describes_something_else(section: str, kind: str, values: dict[str, Any]) -> None:
    cfg = configuration("logger=none callbacks.progress=null")
    OmegaConf.update(cfg, section, values, force_add=True)
    with pytest.raises(InputError, match=f"^{section}: must describe a {kind}; correct {section}._target_, and leave"):
        build.build_data(cfg) if section == "data" else build.build_trainer(cfg)


def test_as_many_processes_as_cores_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    check(configuration("trainer=ddp_cpu", {"trainer.devices": 64}))
    assert "at most 64" in answer(configuration("trainer=ddp_cpu", {"trainer.devices": 65}))


class Pair(TypedDict):
    left: Count
    right: NotRequired[int]


class Mine:
    """A class of a user's own."""

    def __init__(
        self,
        plain,
        width: int = 0.5,  # type: ignore[assignment]  # an annotation that is wrong: it is not used
        rate: Positive = 1.0,
        name: str = None,  # type: ignore[assignment]  # noqa: RUF013  (None without saying so, as older code has it)
        pairs: Sequence[Pair] = (),
        when: Literal["now", "later", 3] = "now",
        missing: Unknown = 1,  # type: ignore[name-defined]  # noqa: F821  (an annotation that cannot be looked up)
        action: Callable[..., Any] | None = None,
        size: int | tuple[int, int] = 1,
        shares: dict[str, Fraction] | None = None,
        **others: Any,
    ) -> None:
        self.options = (plain, width, rate, name, pairs, when, missing, action, size, shares, others)


MINE = {"_target_": f"{__name__}.Mine", "plain": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": "abc", "missing": "abc", "plain": None, "anything": 3, "name": None, "rate": 2}, ""),
        ({"pairs": [{"left": 1}], "when": 3, "action": {"_target_": "torch.relu"}, "size": [1, 2]}, ""),
        ({"shares": {"a": 0.5}, "plain": {"_target_": f"{__name__}.Mine", "plain": 2}}, ""),
        ({"rate": 0}, "mine.rate=0: must be greater than 0"),
        ({"name": 5}, "mine.name=5: must be text"),
        ({"pairs": [{"right": 1}]}, "left is missing"),
        ({"pairs": [{"left": 0}]}, "mine.pairs[0].left=0"),
        ({"when": 4}, "must be 'now', 'later' or 3"),
        ({"action": 4}, "must be callable"),
        ({"size": [1]}, "must be a valid integer or a valid tuple"),
        ({"shares": {"a": 2}}, "mine.shares.a=2"),
        ({"plain": {"_target_": f"{__name__}.Mine", "plain": 2, "rate": 0}}, "mine.plain.rate=0"),
        ({"plain": [{"_target_": f"{__name__}.Nothing"}]}, "has no attribute 'Nothing'"),
    ],
)
def test_classes_of_a_users_own(values: dict[str, Any], message: str) -> None:
    cfg = configuration("", {"callbacks.mine": {**MINE, **values}})
    if not message:
        check(cfg)
        return
    assert message.replace("mine.", "callbacks.mine.") in answer(cfg)


def test_a_module_that_fails_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_that_fails.py").write_text("raise OSError('no such\\nluck')\n")
    (tmp_path / "module_that_ends.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "module_that_needs.py").write_text("import module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, message in {
        "module_that_fails": "module_that_fails.Gate: cannot be imported: no such",
        "module_that_ends": "module_that_ends.Gate: cannot be imported",
        "module_that_needs": "No module named 'module_that_is_missing'",
    }.items():
        with pytest.raises(InputError, match=message):
            find(f"{name}.Gate", "gate._target_")


def test_options_that_only_the_constructor_knows_get_one_message(tmp_path: Path) -> None:
    cfg = configuration("", {"gate": {"_target_": f"{__name__}.Mine", "_partial_": True}})
    with pytest.raises(InputError, match=r"gate: .*missing 1 required"):
        build.check_options(cfg)


def test_every_option_of_the_classes_in_conf_is_checked() -> None:
    """An annotation that pydantic cannot take would accept anything, without a word."""
    texts = [path.read_text() for path in (ROOT / "conf").rglob("*.yaml")]
    targets = {name for text in texts for name in re.findall(r"_target_: (mtl\.[\w.]+)", text)}
    assert len(targets) > 60
    for target in targets:
        unchecked = {name for name, kind in options(find(target, ""))[0].items() if adapter(kind) is None}
        written = {name for name in unchecked if options(find(target, ""))[0][name] is not Any}
        assert written <= {"spec", "tasks"}, target  # which the program supplies
        if target.startswith(("mtl.callbacks", "mtl.data_modules")) and "__init__" in vars(find(target, "")):
            assert hasattr(find(target, "").__init__, "__wrapped__"), target  # also without a configuration


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (Address, "http://a.org/x/", ""),
        *[(Address, f"http://{end}", "http:// or https://") for end in ("", "a b", "a:port", "a:99999", "a/\x1b")],
        *[(Address, url, "http:// or https://") for url in ("file:///tmp", "ftp://a.org", "a.org")],
        *[(TaskName, name, "without dots, slashes") for name in ("", " a", "a/b", "a.b", "a\\b", "a\nb", "x" * 101)],
        (dict[TaskName, int], {"a.b": 1}, "here.a.b: this name must be text of at most 100 characters"),
        (dict[Literal["rte", "qqp"], int], {"rtee": 1}, "this name must be 'rte' or 'qqp'; did you mean rte?"),
    ],
)
def test_kinds(annotation: Any, value: Any, message: str) -> None:
    if not message:
        assert fits(annotation, value)
        return
    with pytest.raises(InputError, match=re.escape(message)):
        valid(annotation, value, "here")


def test_folders_below_home_and_shares_of_splits_with_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert valid(FilePath, "~/data", "data_dir") == Path("/home/someone/data")
    task = {"path": "a.csv", "val_path": "b.csv", "text": "t", "label": "l", "kind": "binary"}
    data = TextDataModule(batch_size=8, tasks={"spam": task}, split=[0.5, 0, 0.5])
    assert data.fractions == {"train": 0.5, "val": 0.0, "test": 0.5}


@pytest.fixture
def hydra() -> Iterator[None]:
    """Have Hydra ready to compose, as it is while the program runs."""
    with own_hydra():
        yield


def failure(*words: str) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        compose("train", list(words))
    return caught.value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gate.gama=1"], "gate.gama=1: no such option; did you mean gate.gamma?"),
        (["gate=commet"], "gate=commet: no such gate; did you mean gate=comet?"),
        (
            ["data=table", "data.split.valid=1.5"],
            "data.split.valid=1.5: no such option; there are data.split.by, data.split.column, data.split.fractions, ",
        ),
        (["trainer.epochs=3"], "trainer.epochs=3: no such option; did you mean trainer.max_epochs?"),
        (["gate.num_experts=3"], "gate.num_experts=3: no such option; did you mean recipe.num_experts?"),
        (["batch_size=64"], "batch_size=64: no such option; did you mean data.batch_size?"),
        (["seed=1,2"], "Ambiguous value for argument 'seed=1,2'"),
        (["gate"], "gate: must be OPTION=VALUE"),
        (["recipe.expert_units=[4"], "close every bracket"),
        (["a b=3"], "a b=3: must be OPTION=VALUE"),
        (["network=single_task", "network/gate_trunk=conv"], "network/gate_trunk=conv: no such option"),
        (["logger=true"], "logger=true: Config group override must be a string or a list"),
        (["gate@network.gate=comet"], "gate@network.gate=comet: no such option"),
        (["+gate=topk"], "Multiple values for gate"),
        ([""], ": must be OPTION=VALUE"),
        (["seed=" + "9" * 5000], "9..."),
    ],
)
@pytest.mark.usefixtures("hydra")
def test_compositions_that_fail_get_one_sentence(words: list[str], message: str) -> None:
    sentence = explain(failure(*words), words)
    assert sentence is not None
    assert message in sentence
    assert len(sentence.splitlines()) == 1


def test_escaped_text_is_text_however_often_it_is_resolved() -> None:
    for letters in itertools.chain.from_iterable(itertools.product("$\\{?}", repeat=size) for size in range(6)):
        text = "".join(letters)
        assert unescape_interpolation(escape_interpolation(text)) == text
        config = OmegaConf.create({"x": [escape_interpolation(text)]})
        OmegaConf.resolve(config)
        assert OmegaConf.to_container(config, resolve=True, throw_on_missing=True) == {
            "x": [escape_interpolation(text)]
        }
