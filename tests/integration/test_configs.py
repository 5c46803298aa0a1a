"""Compose, build and train with every file in conf/, for a step or two."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

from callbacks.execution_switch import ExecutionSwitch
from callbacks.routing_monitor import RoutingMonitor
from mtl import build
from mtl.hooks import NoProfiler, drop_empty_hooks, need_hook
from mtl.module import MultiTaskModule
from mtl.types import InputError
from tests.conftest import ROOT
from tests.integration.helpers import GROUPS, compose_small
from train import run

NEEDS = {  # what a file only makes sense with
    "gate=hash": ["data=movielens"],
    "network=frozen_experts": ["data=synthetic_recovery"],
    "schedule=temperature": ["gate=softmax_selector"],
    "schedule=matrix_temperature": ["network=routed_mnists", "data=four_mnists", "gate=gumbel_matrix"],
    "network/gate_trunk=conv": ["data=multi_mnist"],
    "network=routed_omniglot": ["data=omniglot", "gate=gumbel_matrix", "data.side=28"],
    "network=routed_mnists": ["data=four_mnists", "gate=gumbel_matrix"],
    "experiment=omniglot": ["+trainer.limit_val_batches=2", "+trainer.limit_test_batches=2"],
}
WORDS = [f"{group}={path.stem}" for group in GROUPS for path in sorted((ROOT / "conf" / group).glob("*.yaml"))]
WORDS = [word for word in WORDS if not word.startswith("trainer=ddp")]  # test_processes.py starts those


@pytest.mark.parametrize("word", WORDS)
def test_every_file_trains(word: str, tmp_path: Path, tiny_data: Path) -> None:
    words = [word, *NEEDS.get(word, []), f"paths.data_dir={tiny_data}"]
    if word == "paths=default":
        words = [word]
    cfg = compose_small(tmp_path / "run", *words, "trainer.max_epochs=1", "+trainer.limit_train_batches=2")
    assert torch.isfinite(torch.tensor(run(cfg)))
    assert (tmp_path / "run" / "results.json").is_file()


@pytest.mark.parametrize(
    "words",
    [
        *[[word] for word in WORDS if word.startswith("network")],
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


@pytest.mark.parametrize("gate", [path.stem for path in sorted((ROOT / "conf" / "gate").glob("*.yaml"))])
def test_every_gate_trains_on_movielens(gate: str, tmp_path: Path, tiny_data: Path) -> None:
    words = [f"gate={gate}", "data=movielens", f"paths.data_dir={tiny_data}", "setting.embedding_dim=8"]
    cfg = compose_small(tmp_path, *words, "trainer.max_epochs=1", "+trainer.limit_train_batches=2")
    assert torch.isfinite(torch.tensor(run(cfg)))


@pytest.mark.parametrize("name", ["four_mnists", "omniglot", "synthetic_pairs_routing"])
def test_experiments_of_routed_networks_run_with_their_baseline(name: str, tmp_path: Path, tiny_data: Path) -> None:
    word = f"experiment={name}"
    words = [word, *NEEDS.get(word, []), "gate=fixed", "schedule=none", f"paths.data_dir={tiny_data}"]
    cfg = compose_small(tmp_path, *words, "trainer.max_epochs=1", "+trainer.limit_train_batches=2")
    assert torch.isfinite(torch.tensor(run(cfg)))


@pytest.mark.parametrize("network", ["shared_bottom", "single_task"])
def test_baselines_on_images(network: str, tmp_path: Path, tiny_data: Path) -> None:
    words = [f"network={network}", "data=multi_mnist", f"paths.data_dir={tiny_data}", "trainer.max_epochs=1"]
    assert torch.isfinite(torch.tensor(run(compose_small(tmp_path, *words))))


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_images_in_every_precision(precision: str, tmp_path: Path, tiny_data: Path) -> None:
    words = [
        "data=multi_mnist",
        f"trainer.precision={precision}",
        f"paths.data_dir={tiny_data}",
        "trainer.max_epochs=1",
    ]
    assert torch.isfinite(torch.tensor(run(compose_small(tmp_path, *words))))


def test_data_brings_its_published_setting_unless_overridden(tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "gate=comet", "data=movielens")
    assert (cfg.network.num_experts, cfg.gate.k, cfg.network.bottom.embedding_dim) == (16, 2, 128)
    assert (list(cfg.network.experts.units), cfg.network.experts.dropout, cfg.data.batch_size) == ([256], 0.5, 512)
    assert (cfg.callbacks.early_stopping.patience, cfg.data.alpha) == (25, 0.9)
    assert compose_small(tmp_path, "data=movielens", "gate=topk", "gate.k=5").gate.k == 5
    assert compose_small(tmp_path, "data=movielens", "setting.num_experts=8").network.num_experts == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gate=comet", "gate.gamma=0"], "gate.gamma=0"),
        (["gate=dselect_k", "gate.gamma=-1"], "gate.gamma=-1"),
        (["gate=topk", "gate.k=20"], "gate.k=20: cannot select 20 of 4 experts"),
        (["gate=comet", "gate.k=20"], "gate.k=20: cannot select 20 of 4 experts"),
        (["gate=comet", "gate.k=two"], "gate.k='two'"),
        (["gate=softmax_selector", "gate.temperature=0"], "gate.temperature=0"),
        (["gate=topk", "gate.normalize=later"], "before, after"),
        (["optimizer.lr=-1"], "optimizer: .*-1"),
    ],
)
def test_options_are_checked_before_data_is_touched(words: list[str], message: str, tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, *words, "data.rows=[1,1,1]")
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        build.check_options(cfg)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+gate.foo=1"], "gate: .* 'foo'"),
        (["+network.foo=1"], "network: .* 'foo'"),
        (["+data.foo=1"], "data: .* 'foo'"),
        (["+callbacks.last.foo=1"], "callbacks.last: .* 'foo'"),
        (["trainer.accelerator=abacus"], "trainer: .*abacus"),
        (["trainer.devices=-3"], "trainer: .*devices"),
        (["seed=one"], "seed=one: must be a whole number"),
    ],
)
def test_options_that_there_are_not_are_one_message(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        run(compose_small(tmp_path, *words))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_gpus_that_are_not_there(tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "trainer=ddp", "trainer.accelerator=gpu")
    with pytest.raises(InputError, match=r"trainer: .*gpu"):
        build.build_trainer(cfg)


def test_saved_configuration_is_the_resolved_one(tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "trainer.max_epochs=1")
    run(cfg)
    assert OmegaConf.load(tmp_path / "config.yaml") == OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))


def test_compiling_takes_one_way_of_execution(tmp_path: Path) -> None:
    cfg = compose_small(tmp_path, "compile=true", "network.execution=auto")
    with pytest.raises(InputError, match=r"compile=true with network.execution=auto.*use network.execution=dense"):
        build.check_options(cfg)
    cfg.network.execution = "dense"
    build.check_options(cfg)


def test_callbacks_keep_only_the_hooks_of_a_step_that_they_use(tmp_path: Path) -> None:
    trainer = build.build_trainer(compose_small(tmp_path))
    monitor = next(callback for callback in trainer.callbacks if isinstance(callback, RoutingMonitor))
    assert callable(monitor.on_train_batch_end)
    assert not callable(monitor.on_before_zero_grad)
    assert callable(monitor.on_fit_start)  # not of a step
    best = next(callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint))
    assert not callable(best.on_train_batch_end)


@pytest.mark.parametrize("often", ["every_n_train_steps: 2", "train_time_interval: {_target_: datetime.timedelta}"])
def test_checkpoints_within_an_epoch_keep_their_hook(tmp_path: Path, often: str) -> None:
    best = "{_target_: pytorch_lightning.callbacks.ModelCheckpoint, " + often + "}"
    trainer = build.build_trainer(compose_small(tmp_path, f"+callbacks.often={best}"))
    assert sum(callable(callback.on_train_batch_end) for callback in trainer.checkpoint_callbacks) == 2  # and the last


def test_a_module_keeps_only_the_hooks_of_a_step_that_it_uses(tmp_path: Path) -> None:
    class Mine(LightningModule):
        def on_after_backward(self) -> None:
            pass

    module = Mine()
    drop_empty_hooks(module, LightningModule)
    assert callable(module.on_after_backward)
    assert not callable(module.on_train_batch_end)
    assert callable(module.training_step)


def test_a_trainer_passes_over_a_hook_while_it_is_not_needed() -> None:
    callback, trainer = ExecutionSwitch(), Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    need_hook(trainer, callback, "on_train_batch_end", False)
    assert not callable(callback.on_train_batch_end)
    need_hook(trainer, callback, "on_train_batch_end", True)
    assert callable(callback.on_train_batch_end)


def test_a_callback_without_work_is_passed_over(tmp_path: Path) -> None:
    def step_hooks(*words: str) -> set[str]:
        cfg = compose_small(tmp_path / "-".join(words), "gate=topk", "trainer.max_epochs=1", *words)
        data, trainer = build.build_data(cfg), build.build_trainer(cfg)
        data.prepare_data()
        data.setup()
        trainer.fit(build.build_module(cfg, build.build_network(cfg, data.spec), data.spec), datamodule=data)
        return {
            type(callback).__name__
            for callback in trainer.callbacks
            if callable(callback.on_train_batch_start) or callable(callback.on_train_batch_end)
        }

    always = {"LastCheckpoint", "RoutingMonitor"}
    assert step_hooks("network.execution=dense") == always
    assert step_hooks("network.execution=auto") == always | {"ExecutionSwitch"}
    assert step_hooks("network.execution=dense", "gate=softmax_selector", "schedule=temperature") == always | {
        "ScheduledBuffer"
    }


def test_profiling_nothing_lets_errors_through() -> None:
    profiler = NoProfiler()
    with profiler.profile("outside"), profiler.profile("inside"):
        pass
    with pytest.raises(KeyError), profiler.profile("failing"):
        raise KeyError


def test_a_step_need_not_be_inspected_each_time() -> None:
    assert inspect.getfullargspec(MultiTaskModule.training_step).args == ["self", "batch", "batch_index"]
    assert is_param_in_hook_signature(MultiTaskModule.training_step, "batch_idx", min_args=2)
