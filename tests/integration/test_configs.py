"""Compose, build and train with every file in conf/, for a step or two."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_class
from mtl.data_modules.task_batches import TasksDataModule
from omegaconf import DictConfig, OmegaConf

from mtl.checks import InputError
from mtl.config import build
from mtl.pipeline.run import run
from mtl.training.weighting import shared_parameters
from tests.conftest import ROOT
from tests.integration import helpers
from tests.integration.helpers import GROUPS, compose_small, composed, narrow

SMALL_TEXTS = ["data.vocabulary=200", "network.config={hidden_size: 16}", "recipe.batch_size=8"]
SST2 = "{path: '${paths.data_dir}/glue/SST-2/train.tsv', text: sentence, label: label, kind: binary}"
OWN_TEXTS = f"data.tasks={{liked: {SST2}}}"
SMALL_GLUE = ["network.pretrained=null", "data.tokenizer=null", "data.max_rows={sst2: 20,qqp: 20}", *SMALL_TEXTS]
GLUE_EXPERIMENTS = ("glue_mt_tag", "glue_mt_switch", "glue_mt_dense", "cglue_mt_tag", "glue_finetune")
FEW = "data.alphabets=[Gujarati,Sylheti,Tibetan]"
SMALL_OMNIGLOT = ["data.side=14", "data.batch_size=2", "data.eval_batch_size=2", FEW]
SMALL_OMNIGLOT += ["+trainer.limit_val_batches=3", "+trainer.limit_test_batches=3"]
NEEDS = {  # what a file only makes sense with, or what keeps its run short
    **{f"gate={path.stem}": ["data=movielens", "recipe.embedding_dim=8"] for path in (ROOT / "conf/gate").iterdir()},
    **{f"experiment={name}": SMALL_GLUE for name in GLUE_EXPERIMENTS},
    "data=glue": SMALL_TEXTS,
    "data=squad": SMALL_TEXTS,
    "data=text": [OWN_TEXTS, *SMALL_TEXTS],
    "recipe=glue": ["data=glue", *SMALL_TEXTS],
    "recipe=squad": ["data=squad", *SMALL_TEXTS],
    "recipe=text": ["data=text", OWN_TEXTS, *SMALL_TEXTS],
    "network=transformer": ["data=glue", *SMALL_TEXTS],
    "experts=ffn": ["data=glue", *SMALL_TEXTS],
    "bottom=text": [
        *("data=text", OWN_TEXTS, "network=shared_bottom"),
        *("bottom.config={hidden_size: 16}", "data.vocabulary=200"),
    ],
    **{f"embedding_optimizer={name}": ["data=movielens"] for name in ("rowwise_adagrad", "sparse_adam")},
    "network=frozen_experts": ["data=synthetic_recovery"],
    "heads=aitm": [
        *("data=table", "data.path=${paths.data_dir}/rows.parquet"),
        "data.tasks={click: {kind: binary}, again: {column: click, kind: binary, after: click}}",
    ],
    "weighting=krum": ["data.tasks_per_group=4"],
    "schedule=temperature": ["gate=softmax_selector"],
    "schedule=matrix_temperature": ["network=routed_mnists", "data=four_mnists", "gate=gumbel_matrix"],
    "network/gate_trunk=conv": ["data=multi_mnist"],
    "network=routed_omniglot": ["data=omniglot", "gate=gumbel_matrix", *SMALL_OMNIGLOT],
    "network=routed_mnists": ["data=four_mnists", "gate=gumbel_matrix"],
    "experts=conv": ["data=multi_mnist"],
    "recipe=celeba": ["data=celeba"],
    **{f"recipe={name}": ["data=molecules"] for name in ("fingerprints", "molecules")},
    "recipe=digits": ["data=multi_mnist"],
    "recipe=four_mnists": ["data=multi_mnist"],
    "recipe=multi_mnist": ["data=digits"],
    "recipe=omniglot": ["data=omniglot", "data.side=56", FEW],
    "experiment=omniglot": SMALL_OMNIGLOT,
    "experiment=synthetic_128tasks": ["data.tasks_per_group=16"],
    "data=omniglot": ["data.side=56", FEW],
}
ALL = [f"{group}={path.stem}" for group in GROUPS for path in sorted((ROOT / "conf" / group).glob("*.yaml"))]
# test_processes.py and test_sharded.py start runs of several processes; those with a teacher test_text_resume.py trains
TAUGHT = (
    "distillation=dense_run",
    *(f"experiment={name}" for name in ("moebert_hash", "comet_bert", "comet_bert_plus")),
)
ALL = [word for word in ALL if not word.startswith(("trainer=ddp", "trainer=fsdp", *TAUGHT))]
WHOLE_RUNS = {"weighting=upgrad", "weighting=uncertainty", "weighting=gradnorm"}  # test_weighting.py has all files


def brought(word: str) -> dict[str, str]:
    """Return the choices that a file makes by its defaults, by group."""
    entries = OmegaConf.load(ROOT / "conf" / f"{word.replace('=', '/')}.yaml").get("defaults", ())
    pairs = [pair for entry in entries if isinstance(entry, DictConfig) for pair in entry.items()]
    own = {str(key).removeprefix("override ").strip("/"): str(name) for key, name in pairs if name is not None}
    return {k: v for group, name in own.items() for k, v in brought(f"{group}={name}").items()} | own


def repeated() -> set[str]:
    """Return files that the run of another file trains, or another test: alone they run only with the slow tests."""
    found = {f"{group}={name}" for group, name in composed([]).choices.items()}  # trained below
    for word in (word for group in ("experiment", "data") for word in ALL if word.startswith(group)):
        found |= {f"{group}={name}" for group, name in brought(word).items()} if word not in found else set()
    found |= {word for word in ALL if word.startswith(("weighting", "embedding_optimizer"))} - WHOLE_RUNS
    return found


REPEATED = repeated()
WORDS = [pytest.param(word, marks=pytest.mark.slow) if word in REPEATED else word for word in ALL]


@pytest.mark.parametrize("word", WORDS)
def test_every_file_trains(word: str, tmp_path: Path, tiny_data: Path) -> None:
    if word in ("logger=wandb", "logger=mlflow"):
        pytest.importorskip(word.removeprefix("logger="))
    words = [word, *NEEDS.get(word, []), f"paths.data_dir={tiny_data}"]
    if word == "paths=default":
        words = [word]
    cfg = narrow(compose_small(tmp_path / "run", *words, "trainer.max_epochs=1", "+trainer.limit_train_batches=2"))
    assert all(f"{group}={name}" in ALL for group, name in cfg.choices.items() if name)
    assert brought(word).items() <= cfg.choices.items()
    assert torch.isfinite(torch.tensor(run(cfg)))
    assert (tmp_path / "run" / "results.json").is_file()


def test_files_that_are_the_defaults_train(tmp_path: Path) -> None:
    run(compose_small(tmp_path, "logger=tensorboard", "trainer.max_epochs=1", "+trainer.limit_train_batches=2"))


@pytest.mark.parametrize(
    "words",
    [
        *[[word] for word in ALL if word.startswith(("network", "bottom", "heads"))],
        ["network=mmoe", "data=multi_mnist", "network.execution=dense"],
        ["network=mmoe", "data=multi_mnist", "network.execution=sparse", "gate=topk"],
    ],
    ids=" ".join,
)
def test_a_process_without_rows_evaluates_every_network(words: list[str], tmp_path: Path, tiny_data: Path) -> None:
    """Of a short split the last process gets a batch without rows."""
    cfg = compose_small(tmp_path, *words, *NEEDS.get(words[0], []), f"paths.data_dir={tiny_data}")
    data = build.build_data(cfg)
    data.prepare_data()
    data.setup()
    network = build.build_network(cfg, data.spec).eval()
    batch = next(iter(data.val_dataloader()))
    predictions = network(batch.select(torch.arange(0)).inputs, list(batch.targets)).predictions
    assert {name: len(value) for name, value in predictions.items()} == dict.fromkeys(batch.targets, 0)


CHAIN = ["data=table", "data.path=${paths.data_dir}/rows.parquet", "gate=softmax"]
CHAIN += ["data.tasks={a: {column: click, kind: binary}, b: {column: click, kind: binary, after: a}, c: ${.a}}"]
PLE = ["network=ple", "gate=softmax", "network.num_levels=3", "recipe.num_experts=3", "network.num_task_experts=1"]
OWNERS = [[word, "gate=softmax"] for word in ALL if word.startswith("network=") and "routed" not in word]
OWNERS += [[word] for word in ALL if word.startswith("network=routed")]
OWNERS += [PLE, [*PLE, "permutation=sinkhorn", "permutation.per_task=true"], [*PLE, *CHAIN]]
OWNERS += [["heads=aitm", *CHAIN], ["heads=per_task", *CHAIN], ["network=single_task", *CHAIN]]
OWNERS += [["network=grouped", "network.groups=[[a],[b,c]]", *CHAIN], ["gate=task_top1", "gate.shared=true"]]


@pytest.mark.parametrize("words", OWNERS, ids=lambda words: " ".join(words[:3]))
def test_a_parameter_is_a_tasks_own_exactly_if_only_its_loss_has_a_gradient_there(
    words: list[str], tmp_path: Path, tiny_data: Path
) -> None:
    """A row of it, if it has a row for each task; the losses are those of all validation rows."""
    words = [*NEEDS.get(words[0], []), *words] if "heads" not in words[0] else words
    words = [*words, f"paths.data_dir={tiny_data}", "recipe.dropout=0", "trainer.precision=64-true"]
    cfg = narrow(compose_small(tmp_path, *words))
    data = build.build_data(cfg)
    data.prepare_data()
    data.setup()
    module = build.build_module(cfg, build.build_network(cfg, data.spec), data.spec).double()
    parameters = dict(module.network.named_parameters())
    used = {name: torch.zeros(len(data.spec.tasks), *p.shape[:1]) for name, p in parameters.items()}  # [T, rows]
    for batch in data.val_dataloader():
        batch = module.converted(batch)
        terms = module.task_losses(module(batch.inputs, list(batch.targets)), batch)
        for task, loss in zip(terms.task_ids, terms.local_losses, strict=True):
            found = torch.autograd.grad(loss, parameters.values(), retain_graph=True, allow_unused=True)
            for name, gradient in zip(parameters, found, strict=True):
                if gradient is not None:
                    used[name][task] += (gradient != 0).reshape(len(gradient), -1).any(1)
    shared, own = ({id(p) for p in part} for part in shared_parameters(module.network))
    found = {name: int((each > 0).sum(0).max()) for name, each in used.items()}  # tasks that reach one row
    assert {name: count for name, count in found.items() if id(parameters[name]) in own and count > 1} == {}
    assert {name: count for name, count in found.items() if id(parameters[name]) in shared and count < 2} == {}


IMAGES = ["data=multi_mnist", "recipe.num_experts=4", "trainer.max_epochs=1", "+trainer.limit_train_batches=2"]
ROUTED = ["gate=fixed", "schedule=none", "trainer.max_epochs=1", "+trainer.limit_train_batches=2"]  # their baseline
ROWS = [["data.tasks_per_group=16", "network=ple"], ["data=movielens"], ["network=routed_headless"]]
ROWS += [["permutation=sinkhorn"], ["data=four_mnists", "optimizer=sgd"]]  # in float16 Adam's eps is 0
COMBINED = [
    *([f"experiment={name}", *ROUTED] for name in ("four_mnists", "omniglot", "synthetic_pairs_routing")),
    *([f"network={name}", *IMAGES] for name in ("shared_bottom", "single_task", "ple")),
    *(
        [f"trainer.precision={precision}", *IMAGES, "callbacks.ema.decay=0.9", "permutation=sinkhorn"]
        for precision in ("64-true", "bf16-mixed", "bf16-true")
    ),
    *(
        [f"trainer.precision={precision}", *words, "trainer.max_steps=2", "~logger"]
        for precision, several in (("64-true", ROWS[:1]), ("bf16-true", ROWS[:1]), ("16-true", ROWS))
        for words in several
    ),
]


@pytest.mark.parametrize("words", COMBINED, ids=" ".join)
def test_combinations_train(words: list[str], tmp_path: Path, tiny_data: Path) -> None:
    """Routed networks with their baseline, baselines on images, and every precision."""
    words = [*words, *NEEDS.get(words[0], []), f"paths.data_dir={tiny_data}"]
    assert torch.isfinite(torch.tensor(run(narrow(compose_small(tmp_path, *words)))))


@pytest.mark.parametrize("weighting", ["upgrad", "uncertainty"])
def test_weightings_in_mixed_precision_train_like_in_float32(weighting: str, tmp_path: Path) -> None:
    """The losses of two steps are not the same, but close."""
    words = [f"weighting={weighting}", "trainer.max_steps=2", "trainer.log_every_n_steps=1", "logger=csv"]
    courses = []
    for precision in ("32-true", "bf16-mixed"):
        run(compose_small(tmp_path / precision, *words, f"trainer.precision={precision}"))
        lines = (tmp_path / precision / "csv" / "metrics.csv").read_text().splitlines()
        courses.append([float(row["train/step_loss"]) for row in csv.DictReader(lines) if row["train/step_loss"]])
    exact, rounded = courses
    assert len(exact) == 2
    assert exact[0] != exact[1]
    assert exact != rounded
    assert exact == pytest.approx(rounded, rel=0.02)


def names(group: str) -> list[str]:
    return [path.stem for path in sorted((ROOT / "conf" / group).glob("*.yaml"))]


def plain(section: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(section, resolve=True)


def test_data_brings_its_published_setting_unless_overridden(tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "gate=comet", "data=movielens")
    assert (cfg.network.num_experts, cfg.gate.k, cfg.network.bottom.embedding_dim) == (16, 2, 128)
    assert (list(cfg.network.experts.units), cfg.network.experts.dropout, cfg.data.batch_size) == ([256], 0.5, 512)
    assert (cfg.callbacks.early_stopping.patience, cfg.data.alpha) == (25, 0.9)
    assert compose_small(tmp_path, "data=movielens", "gate=topk", "gate.k=5").gate.k == 5
    assert compose_small(tmp_path, "data=movielens", "recipe.num_experts=8").network.num_experts == 8


FOREIGN = {  # recipes that differ in all that a recipe may choose: its data, its experts, and whether it has a schedule
    "jester": ("mtl.experts.dense.StackedDense", False),
    "digits": ("mtl.experts.conv.StackedConv", False),
    "synthetic_moe": ("mtl.experts.dense.StackedDense", True),
}
PAIRS = list(zip(names("data"), itertools.cycle(FOREIGN), strict=False))


@pytest.mark.parametrize(("data", "recipe"), PAIRS)
def test_any_data_takes_any_recipe(data: str, recipe: str) -> None:
    cfg = composed([f"data={data}", f"recipe={recipe}"])
    assert cfg.recipe == composed([f"data={recipe}"]).recipe
    assert (cfg.network.experts._target_, "entropy_schedule" in cfg.callbacks) == FOREIGN[recipe]


def test_values_set_in_a_composed_configuration_equal_those_that_hydra_composes() -> None:
    """So the tests set them, which is faster."""
    words = ["data=movielens", "recipe.comet={gamma: 2}", "recipe.expert_units=[8]", "+data.x=1", "~callbacks.best"]
    words += ["recipe.k=${recipe.num_experts}", "run_name='two words'", "seed=3", "gate=topk"]
    assert composed(words) == helpers._composed(tuple(words))


def test_what_comes_later_wins(tmp_path: Path) -> None:
    """Defaults, recipe, experiment, command line."""
    words = ["experiment=synthetic_128tasks", "recipe=jester"]
    recipe = compose_small(tmp_path, *words, "recipe.max_epochs=7").recipe
    assert recipe.gumbel_softmax.sparsity_weight == 1e-3  # train.yaml
    assert (recipe.embedding_dim, recipe.head_units) == (64, [256])  # the recipe
    assert (recipe.num_experts, recipe.batch_size) == (32, 256)  # the experiment: 16 and 2048 in the recipe
    assert recipe.max_epochs == 7
    cfg = compose_small(tmp_path, "experiment=synthetic_16tasks")
    assert "_target_" not in cfg.callbacks.entropy_schedule  # what the recipe says of it has no effect


@pytest.mark.parametrize("data", names("data"))
def test_a_data_file_says_only_what_the_data_is(data: str, tmp_path: Path) -> None:
    file = OmegaConf.load(ROOT / "conf" / "data" / f"{data}.yaml")
    assert set(file) <= {"defaults", "data", "task_batches"}
    for entry in file.defaults:
        inherited = isinstance(entry, str) and (
            entry in names("data") or entry in ("/open_tasks@_global_", "/open_table@_global_")
        )
        assert inherited or list(entry) == ["override /recipe"]
    cfg = compose_small(tmp_path, f"data={data}", "trainer=ddp")
    assert cfg.task_batches == issubclass(get_class(cfg.data._target_), TasksDataModule)
    assert cfg.trainer.strategy.find_unused_parameters == (cfg.task_batches or "routed" in cfg.network._target_)


def test_components_without_a_task_get_no_gradient_in_any_process(tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "data=synthetic_moe", "network=routed_dense", "gate=fixed", "trainer=ddp_cpu")
    assert cfg.trainer.strategy.find_unused_parameters


def test_users_own_data_and_recipe(tmp_path: Path) -> None:
    for group, content in {
        "data": "defaults: [table, override /recipe: visits]\ndata: {path: visits.csv}",
        "recipe": "defaults: [table]\nrecipe: {num_experts: 3}",
    }.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "visits.yaml").write_text(f"# @package _global_\n{content}\n")
    words = [f"hydra.searchpath=[file://{tmp_path}]", "data=visits"]
    cfg = compose_small(tmp_path, *words)
    assert (cfg.data.path, cfg.network.num_experts, cfg.recipe.patience) == ("visits.csv", 3, 10)
    assert compose_small(tmp_path, *words, "recipe=movielens").network.num_experts == 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=multi_mnist", "experts=dense"], r"cannot take images \(1, 36, 36\) as input; experts=conv does"),
        (["data=multi_mnist", "recipe=table"], r"cannot take images .* experts=conv does"),
        (["data=multi_mnist", "recipe=table", "experts=conv"], r"convolutions=\[\]: .* at least one"),
        (["data=movielens", "experts=conv"], "need images as input; experts=dense takes other inputs"),
    ],
)
def test_experts_that_do_not_fit_the_inputs(words: list[str], message: str, tmp_path: Path, tiny_data: Path) -> None:
    with pytest.raises(InputError, match=message):
        run(compose_small(tmp_path, *words, f"paths.data_dir={tiny_data}"))


def test_schedules_of_the_permutation_start_at_its_values(tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "permutation=sinkhorn", "permutation.tau=0.1", "permutation.rounds=7")
    assert (cfg.callbacks.permutation_tau.start, cfg.callbacks.permutation_rounds.start) == (0.1, 7)


def test_compiling_needs_dense_execution(tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "compile=true", "network.execution=auto")
    with pytest.raises(InputError, match=r"compile=true with network.execution=auto.*use network.execution=dense"):
        build.check_options(cfg)
    cfg.network.execution = "dense"
    build.check_options(cfg)
