"""Distillation: the losses are those of the paper, the teacher never changes, and what does not fit is refused."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mtl.data_modules.base import TensorDataModule
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn

from mtl.checkpoints.files import CheckpointIO, read
from mtl.checkpoints.trust import check_config
from mtl.checks import InputError
from mtl.config.teacher import read_teacher
from mtl.gates import TopKGate
from mtl.networks.transformer import Transformer
from mtl.pipeline.run import run
from mtl.runs.signals import Stopped
from mtl.training.distillation import Distillation, prediction_losses
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, DataSpec, TaskSpec, Tokens
from tests.integration.helpers import compose_small
from tests.stopping import StopAt, same, watched
from tests.transformers import CONFIG, LENGTH, SPEC, TASKS, VOCAB, shake, tokens
from tests.transformers import transformer as tiny

BINARY, CLASSES, REAL = TASKS


def token_batch(rows: int, tasks: Sequence[TaskSpec] = (BINARY,), seed: int = 0) -> Batch:
    """Return rows of 3 to ``LENGTH`` tokens with random labels."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (rows,), generator=draw).tolist()
    labels = torch.randint(2, (rows,), generator=draw)
    targets = {task.name: labels if task.kind == "multiclass" else labels.float() for task in tasks}
    return Batch(tokens(lengths, seed=seed), targets)


class TokenData(TensorDataModule):
    """Random token sequences with random labels; ``classes``: of the task, 1 for a binary one."""

    def __init__(self, batch_size: int, vocab: int = VOCAB, task: str = "a", classes: int = 1) -> None:
        super().__init__(batch_size)
        self.vocab = vocab
        kind: Any = "binary" if classes == 1 else "multiclass"
        self.task = TaskSpec(task, kind, num_classes=classes)

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        inputs = {"tokens": Tokens(self.vocab, LENGTH), "segments": Tokens(2, LENGTH)}
        sizes = {"train": 40, "val": 10, "test": 10}
        return DataSpec(inputs, [self.task]), {name: token_batch(rows, [self.task]) for name, rows in sizes.items()}


def transformer(mixture: bool = True, seed: int = 0, dropout: float = 0.0, **sizes: int) -> Transformer:
    layers = {} if mixture else {"mixture_layers": []}
    network = tiny(partial(TopKGate, k=2), seed, num_experts=3, dropout=dropout, config=CONFIG | sizes, **layers)
    shake(network)
    return network


def softmax_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return KL(p || q) for each row, from probabilities."""
    p, q = p_logits.double().softmax(-1), q_logits.double().softmax(-1)
    return (p * (p / q).log()).sum(-1)


def test_predictions_are_compared_as_in_the_paper() -> None:
    """Classes by the symmetric KL divergence, of which a binary task has two; numbers by the squared error."""
    z, t = torch.randn(4, 3), torch.randn(4, 3)
    expected = (softmax_kl(z, t) + softmax_kl(t, z)) / 2
    torch.testing.assert_close(prediction_losses(CLASSES, z, t), expected.float())
    z, t = torch.tensor([0.5, -2.0]), torch.tensor([-1.0, 3.0])
    p, q = z.sigmoid(), t.sigmoid()
    expected = ((p - q) * (p / q).log() + (q - p) * ((1 - p) / (1 - q)).log()) / 2
    torch.testing.assert_close(prediction_losses(BINARY, z, t), expected)
    assert prediction_losses(REAL, torch.tensor([1.0, 2.0]), torch.tensor([1.5, 5.0])).tolist() == [0.25, 9.0]


@pytest.mark.parametrize(("task", "dtype"), [(BINARY, torch.float32), (CLASSES, torch.bfloat16)])
def test_extreme_logits_give_finite_losses_and_gradients(task: TaskSpec, dtype: torch.dtype) -> None:
    z = torch.tensor([1e4, -1e4, 0.0], dtype=dtype, requires_grad=True)
    logits, target = (z, -z.detach()) if task is BINARY else (z[None], -z.detach()[None])
    losses = prediction_losses(task, logits, target)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert bool(losses.isfinite().all())
    assert bool(z.grad.isfinite().all())
    assert float(losses.detach().max()) > 9e3  # 1/2 (p - q) (z - t)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_losses_of_a_batch(task: TaskSpec) -> None:
    student, teacher, batch = transformer(seed=1), transformer(False, seed=2), token_batch(4, [task])
    distil = Distillation(teacher, TASKS, weight=5.0)
    output, target = student(batch.inputs, [task.name]), teacher(batch.inputs, [task.name])
    losses = distil.losses(batch.inputs, output)
    layers = sum((h - t).square().mean() for h, t in zip(output.hidden, target.hidden, strict=True))
    rows = prediction_losses(task, output.predictions[task.name], target.predictions[task.name])
    assert (len(output.hidden), list(losses)) == (3, ["distillation_layers", "distillation_predictions"])
    torch.testing.assert_close(losses["distillation_layers"], 5 * layers)
    torch.testing.assert_close(losses["distillation_predictions"], 5 * rows.mean())
    assert float(losses["distillation_predictions"].detach()) > 1e-3
    for part, name in (("layers", "distillation_predictions"), ("predictions", "distillation_layers")):
        some = Distillation(teacher, TASKS, 5.0, **{part: False}).losses(batch.inputs, output)
        assert list(some) == [name]
        assert torch.equal(some[name], losses[name])


def module_with(distil: Distillation | None, student: nn.Module | None = None) -> MultiTaskModule:
    module = MultiTaskModule(student or transformer(seed=1), TASKS, torch.optim.AdamW, {}, distil)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # there is no trainer
    return module


def test_the_teacher_is_frozen_and_no_part_of_the_module() -> None:
    teacher = transformer(False, seed=2, dropout=0.5)
    before = {name: value.clone() for name, value in teacher.named_parameters()}
    module = module_with(Distillation(teacher, TASKS)).train()
    assert not any(part.training for part in teacher.modules())
    module.training_step(token_batch(4), 0)["loss"].backward()
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in teacher.parameters())
    assert module.network.embeddings.word_embeddings.weight.grad is not None
    optimizer = module.configure_optimizers()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in teacher.named_parameters())
    own = {id(parameter) for parameter in teacher.parameters()}
    assert not own & {id(parameter) for parameter in module.parameters()}
    assert not own & {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert module.state_dict().keys() == module_with(None).state_dict().keys()


def test_the_loss_of_a_step_is_the_sum_of_all_parts() -> None:
    """Batches of a step each add their distillation whole, as they add their task losses."""
    distil = Distillation(transformer(False, seed=2), TASKS, weight=3.0)
    with_teacher, without = module_with(distil), module_with(None)
    batches = [token_batch(4, [BINARY]), token_batch(3, [REAL], seed=1)]
    parts = [distil.losses(batch.inputs, with_teacher(batch.inputs, list(batch.targets))) for batch in batches]
    loss = with_teacher.training_step(batches, 0)["loss"]
    torch.testing.assert_close(
        loss, without.training_step(batches, 0)["loss"] + sum(value for part in parts for value in part.values())
    )
    for name in ("distillation_layers", "distillation_predictions"):
        torch.testing.assert_close(with_teacher.train_meter.aux[name], sum(part[name] for part in parts).detach())


def test_the_average_over_processes_is_the_mean_over_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process gets half of the rows, with different numbers of tokens; its share depends on both halves."""
    student, teacher = transformer(seed=1), transformer(False, seed=2)
    distil, batch = Distillation(teacher, TASKS, weight=2.0), token_batch(6)

    def losses(rows: Tensor) -> dict[str, Tensor]:
        inputs = batch.select(rows).inputs
        return distil.losses(inputs, student(inputs, ["a"]))

    halves = [torch.tensor([0, 1]), torch.tensor([2, 3, 4, 5])]
    tokens = [int((batch.inputs["tokens"][rows] != 0).sum()) for rows in halves]
    assert tokens[0] * 2 != tokens[1]
    whole = losses(torch.arange(6))
    gradient = torch.autograd.grad(sum(whole.values()), student.embeddings.word_embeddings.weight)[0]
    counts = {tokens[0]: sum(tokens), tokens[1]: sum(tokens), 2: 6, 4: 6}
    monkeypatch.setattr("mtl.distributed.world_size", lambda: 2)
    monkeypatch.setattr("mtl.distributed.all_reduce_sum", lambda value: value.new_tensor(counts[int(value)]))
    shares = [losses(rows) for rows in halves]
    for name, value in whole.items():
        torch.testing.assert_close((shares[0][name] + shares[1][name]) / 2, value)
    total = sum(value for share in shares for value in share.values()) / 2
    torch.testing.assert_close(torch.autograd.grad(total, student.embeddings.word_embeddings.weight)[0], gradient)


WORDS = ["network=transformer", "gate=topk", "recipe.num_experts=3", "recipe.head_units=[]", "recipe.dropout=0.1"]
WORDS += ["logger=csv", "trainer.max_epochs=2", "trust=[tests]"]


def config(folder: Path, *words: str, sizes: dict[str, int] | None = None, **data: Any) -> DictConfig:
    """Return the configuration of a run on ``TokenData``; ``sizes`` replaces some of the encoder's."""
    cfg = compose_small(folder, *WORDS, *words)
    with open_dict(cfg):
        cfg.data = {"_target_": f"{__name__}.TokenData", "batch_size": 8, **data}
        if "pretrained" in cfg.network:
            cfg.network.config = CONFIG | (sizes or {})
    return cfg


def distilled(folder: Path, teacher: Path, *words: str, **options: Any) -> DictConfig:
    """Return the configuration of a run with the ``teacher``."""
    return config(folder, "distillation=dense_run", f"distillation.teacher='{teacher}'", *words, **options)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a dense run."""
    folder = tmp_path_factory.mktemp("teacher")
    run(config(folder, "network.mixture_layers=[]", "trainer.max_epochs=1"))
    return folder / "checkpoints" / "best.ckpt"


def logged(folder: Path) -> dict[str, list[str]]:
    """Return what a run has logged in training, by name, except how long it took."""
    rows = list(csv.DictReader((folder / "csv" / "metrics.csv").read_text().splitlines()))
    names = [name for name in rows[0] if name.startswith("train/") and name != "train/seconds_per_epoch"]
    return {name: [row[name] for row in rows if row[name]] for name in names}


def test_a_resumed_run_equals_an_uninterrupted_one(teacher: Path, tmp_path: Path) -> None:
    """Also if the teacher has moved. The checkpoint holds nothing of the teacher but its path."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(distilled(whole, teacher, "distillation.weight=5"))
    with pytest.raises(Stopped):
        run(watched(distilled(parts, teacher, "distillation.weight=5"), StopAt, batch=6))
    last = parts / "checkpoints" / "last.ckpt"
    assert read(last)["global_step"] == 7  # in the second of two epochs
    moved = shutil.copy(teacher, tmp_path / "moved.ckpt")
    run(distilled(parts, moved, "distillation.weight=5", f"ckpt='{last}'"))
    expected, got = (read(folder / "checkpoints" / "last.ckpt") for folder in (whole, parts))
    assert got["config"]["distillation"] == {"teacher": str(moved), "weight": 5, "layers": True, "predictions": True}
    assert same(expected["state_dict"], got["state_dict"])
    assert same(expected["optimizer_states"], got["optimizer_states"])
    assert logged(whole) == logged(parts)
    assert all(len(logged(whole)[f"train/aux/distillation_{part}"]) == 2 for part in ("layers", "predictions"))


def test_the_teacher_is_the_network_of_the_checkpoint(teacher: Path, tmp_path: Path) -> None:
    """It has the weights there; to build it draws none of the run's random numbers."""
    found = read_teacher(distilled(tmp_path, teacher))
    student, batch = transformer(), token_batch(4)
    state = torch.get_rng_state()
    network: Any = found.distillation(student, DataSpec(SPEC.inputs, [BINARY])).teacher
    assert torch.equal(torch.get_rng_state(), state)
    saved = read(teacher)["state_dict"]
    assert {f"network.{name}" for name in network.state_dict()} == {n for n in saved if n.startswith("network.")}
    assert all(torch.equal(value, saved[f"network.{name}"]) for name, value in network.named_parameters())
    assert torch.equal(network(batch.inputs).predictions["a"], network(batch.inputs).predictions["a"])


def test_a_run_that_only_tests_reads_no_teacher(teacher: Path, tmp_path: Path) -> None:
    cfg = distilled(tmp_path, tmp_path / "gone.ckpt")
    cfg.evaluate = str(teacher)
    assert read_teacher(cfg) is None
    assert read_teacher(config(tmp_path)) is None


def test_networks_without_hidden_states_are_distilled_from_predictions(tmp_path: Path) -> None:
    words = ["recipe.dropout=0", "recipe.head_units=[8]", "logger=csv", "trainer.max_epochs=1"]
    run(compose_small(tmp_path / "teacher", *words, "network=shared_bottom"))
    path = tmp_path / "teacher" / "checkpoints" / "best.ckpt"
    words += ["distillation=dense_run", f"distillation.teacher='{path}'"]
    with pytest.raises(InputError, match=r"layers=true compares .* but this run has MMoE; distillation.layers=false"):
        run(compose_small(tmp_path / "student", *words))
    run(compose_small(tmp_path / "student", *words, "distillation.layers=false"))
    names = [name for name in logged(tmp_path / "student") if "distillation" in name]
    assert names == ["train/aux/distillation_predictions"]


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ([], {"sizes": {"hidden_size": 48}}, "does not fit this run: its hidden_size is 16, here it is 48$"),
        ([], {"task": "b", "vocab": 60}, "it has no task b, only a; its vocab_size is 40, here it is 60$"),
        ([], {"classes": 3}, "its task a is binary, here it is multiclass of 3 classes$"),
        (["distillation.layers=false", "distillation.predictions=false"], {}, "leave nothing to compare"),
        (["distillation.teacher=nowhere.ckpt"], {}, "distillation.teacher=nowhere.ckpt: checkpoint .*no such file"),
        (["trust=[]"], {}, "TokenData"),
    ],
)
def test_what_does_not_fit_gives_one_message(
    words: list[str], options: dict[str, Any], message: str, teacher: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        run(distilled(tmp_path / "run", teacher, *words, **options))
    assert not (tmp_path / "run").exists()


def test_a_foreign_teacher_runs_nothing(teacher: Path, tmp_path: Path) -> None:
    """Neither does a checkpoint to resume that names a teacher of its own."""
    content = torch.load(teacher, weights_only=True)
    content["config"]["network"]["heads"] = {"_target_": "os.system", "command": f"touch {tmp_path / 'sentinel'}"}
    path = tmp_path / "foreign.ckpt"
    CheckpointIO().save_checkpoint(content, path)
    with pytest.raises(InputError, match=r"distillation.teacher=.*network.heads names 'os.system'"):
        read_teacher(distilled(tmp_path, path))
    for value in ({"_target_": "os.system", "command": "true"}, "${oc.env:HOME}"):
        options = content["config"] | {"network": {}, "distillation": {"teacher": value}}
        with pytest.raises(InputError, match=r"trust=|interpolation"):
            check_config(options, ["tests"], "strange.ckpt")
    assert not (tmp_path / "sentinel").exists()
