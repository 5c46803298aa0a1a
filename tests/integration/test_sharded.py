"""Processes that shard the parameters among them train like one process, and like processes with whole copies."""

from __future__ import annotations

import shutil
import signal
import struct
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import mtl
from mtl.checkpoints.files import CheckpointIO, previous_checkpoint, read, read_to_resume
from mtl.checkpoints.shards import checksum_of, read_shards
from mtl.checks import InputError
from mtl.config.build import build_trainer, check_options
from mtl.pipeline.run import run
from tests.conftest import ROOT
from tests.glue_files import TINY, write_glue
from tests.integration.helpers import NARROW, SMALL, compose_small, composed
from tests.integration.test_processes import assert_close, course, ended, same
from tests.programs import Forked

WORDS = [*SMALL, "trainer.precision=64-true", "logger=csv", "seed=3", "recipe.dropout=0"]
SPLIT = "trainer.strategy.split_rows=20"
MOVIELENS = ["data=movielens", *NARROW]
MMOE = [*MOVIELENS, "gate=comet", "network.execution=sparse", "permutation=sinkhorn", "recipe.permutation.epochs=1.3"]
MMOE += ["callbacks.ema.decay=0.9", "trainer.accumulate_grad_batches=3", "trainer.gradient_clip_val=0.05"]
MMOE += ["weighting=uncertainty", "lr_schedule=linear", "callbacks.lr_schedule.warmup=0.2"]
ROUTED = ["data=synthetic_pairs", "data.rows=[400,100,100]", "network=routed_dense"]
BUDGET = [*ROUTED, "gate=gumbel_matrix", "recipe.gumbel_matrix.budget_weight=0.1"]
TEXTS = [*TINY, "data.tasks=[rte,sst2,stsb]", "gate=comet", "recipe.comet.entropy_weight=1.0", "recipe.k=2"]


def sharded(folder: Path, *words: str, processes: int = 2, trainer: str = "fsdp_cpu") -> Forked:
    several = [f"trainer={trainer}", f"trainer.devices={processes}"]
    return Forked(
        [*several, *words, f"hydra.run.dir={folder}"], folder.parent / f"{folder.name}_output", processes, ROOT
    )


@pytest.mark.parametrize(
    ("words", "batch", "epochs"),
    [
        pytest.param(MMOE, 80, 3, id="mmoe"),
        *(
            pytest.param(words, batch, epochs, id=name, marks=pytest.mark.slow)
            for name, words, batch, epochs in [
                ("softmax", [*MOVIELENS, "gate=softmax", "weighting=famo"], 40, 20),
                ("topk", [*MOVIELENS, "gate=topk", "gate.noisy=false", "gate.balance_weight=0.1"], 40, 20),
                ("comet", MMOE, 40, 50),
                ("ensemble", [*MOVIELENS, "network=shared_bottom", "ensemble=2"], 40, 20),
                ("ple", [*MOVIELENS, "network=ple", "gate=remoe", "trainer.gradient_clip_algorithm=value"], 40, 20),
                ("routed", [*ROUTED, "gate=dselect_k", "schedule=none"], 20, 7),
                ("budget", BUDGET, 20, 7),
                ("texts", TEXTS, 4, 4),
            ]
        ),
    ],
)
def test_sharded_equals_one(words: list[str], batch: int, epochs: int, tmp_path: Path, tiny_data: Path) -> None:
    """In float64, across hardening and accumulation, with uneven batches; in slow tests over 100 steps."""
    data = tiny_data
    if words is TEXTS:
        data = tmp_path / "data"
        write_glue(data / "glue", {"rte": 40, "sst2": 40, "stsb": 40})
    words = [*WORDS, *words, f"paths.data_dir={data}", f"trainer.max_epochs={epochs}"]
    many = epochs > 3
    for processes in (2, 4) if many else (2,):
        found = tmp_path / f"{processes}"
        ended(sharded(found, *words, SPLIT, f"data.batch_size={batch // processes}", processes=processes))
    if "gate=gumbel_matrix" not in words:  # its noise differs from that of one process
        run(compose_small(tmp_path / "one", *words, f"data.batch_size={batch}"))
        assert_close(tmp_path / "2", tmp_path / "one", 100 if many else 12)
    if many:
        assert_close(tmp_path / "4", tmp_path / "2", 100)
        ended(sharded(tmp_path / "ddp", *words, f"data.batch_size={batch // 2}", trainer="ddp_cpu"))
        assert_close(tmp_path / "2", tmp_path / "ddp", 100)


def test_killed_and_resumed_with_two_or_one(tmp_path: Path, tiny_data: Path) -> None:
    """One of two is killed within an epoch; two go on with the same bits, one with the same numbers up to rounding."""
    words = [*WORDS, *MMOE, f"paths.data_dir={tiny_data}", "trainer.max_epochs=2", "callbacks.last.every_n_steps=5"]
    words += ["logger.csv.flush_logs_every_n_steps=1", SPLIT, "data.batch_size=20", "trainer.accumulate_grad_batches=2"]
    whole, folder, alone = (tmp_path / name for name in ("whole", "run", "alone"))
    running, last = sharded(folder, *words), folder / "checkpoints" / "last.ckpt"
    running.wait_for(last)
    running.wait_for(folder / "csv" / "metrics.csv", after=last.stat().st_mtime_ns)  # the saved step is logged, too
    running.signal(signal.SIGKILL, rank=1)
    outcome = running.wait()
    assert "another process of this run has ended; resume with" in outcome.output
    shutil.copytree(folder, alone)
    here = ["callbacks.progress=null", f"paths.data_dir={tiny_data}"]
    go_on = [f"ckpt={folder / 'checkpoints' / 'last.ckpt'}", *here]
    ended(sharded(whole, *words), sharded(folder, *go_on))
    assert 0 < read(alone / "checkpoints" / "last.ckpt")["global_step"] < max(course(whole))
    assert course(folder) == course(whole)
    same(folder, whole)
    go_on = [f"ckpt={alone / 'checkpoints' / 'last.ckpt'}", *here, "trainer=default"]
    ended(Forked([*go_on, "data.batch_size=40", f"hydra.run.dir={alone}"], tmp_path / "one", cwd=ROOT))
    assert_close(alone, whole, 10)

    model = mtl.load(alone)
    rows = {name: torch.ones(1, dtype=torch.long) for name in model.spec.inputs}
    assert mtl.load(folder).predict(rows).equals(mtl.load(whole).predict(rows))
    check_parts(folder / "checkpoints" / "last.ckpt")


def check_parts(last: Path) -> None:
    """Each process has saved its half; a damaged or forged half is one sentence, and the previous save is whole."""
    content, bare = read(last), torch.load(last, weights_only=True)
    parts = last.with_name(bare["parts"]["folder"])
    named = {bare["parts"]["folder"], torch.load(previous_checkpoint(last), weights_only=True)["parts"]["folder"]}
    assert {found.name for found in last.parent.glob("parts_*")} == named
    sizes = [file.stat().st_size for file in sorted(parts.iterdir())]
    size = sum(leaf.nbytes for leaf in tree_leaves(bare) if isinstance(leaf, torch.Tensor) and leaf.is_meta)
    assert sum(sizes) < 1.3 * size + 60_000
    assert max(sizes) < 1.2 * min(sizes)
    assert not any(leaf.is_meta for leaf in tree_leaves(dict(content)) if isinstance(leaf, torch.Tensor))
    CheckpointIO().save_checkpoint(bare | {"parts": {"folder": "..", "checksums": []}}, last.with_name("forged.ckpt"))
    with pytest.raises(InputError, match=r"parts\.folder="):
        read(last.with_name("forged.ckpt"))
    CheckpointIO().save_checkpoint(bare | {"parts": None}, last.with_name("bare.ckpt"))
    with pytest.raises(InputError, match="its parts have other shapes"):
        read(last.with_name("bare.ckpt"))
    (parts / "1.ckpt").rename(last.parents[2] / "elsewhere.ckpt")
    (parts / "1.ckpt").symlink_to(last.parents[2] / "elsewhere.ckpt")
    with pytest.raises(InputError, match=f"its part {parts.name}/1.ckpt is missing or damaged"):
        read(last)
    (last.parents[2] / "elsewhere.ckpt").replace(parts / "1.ckpt")
    (parts / "1.ckpt").write_bytes((parts / "1.ckpt").read_bytes()[:-9000])
    with pytest.raises(InputError, match=f"its part {parts.name}/1.ckpt is missing or damaged"):
        read(last)
    assert read_to_resume(last).path == previous_checkpoint(last)
    (parts / "1.ckpt").unlink()
    with pytest.raises(InputError, match=f"its part {parts.name}/1.ckpt is missing or damaged"):
        read(last)


def test_a_process_reads_its_own_part(tmp_path: Path) -> None:
    """Another part may even be damaged, but not lack its end."""
    folder, rows = tmp_path / "parts_1", torch.arange(6000.0).view(6, 1000)
    folder.mkdir()
    for rank in range(3):
        torch.save([rows[2 * rank : 2 * rank + 2].clone()], folder / f"{rank}.ckpt")
    sums = [checksum_of(folder / f"{rank}.ckpt") for rank in range(3)]
    content = {"w": torch.empty(6, 1000, device="meta"), "parts": {"folder": "parts_1", "checksums": sums}}
    damaged = (folder / "1.ckpt").read_bytes()
    value = struct.pack("<f", 2500.0)
    (folder / "1.ckpt").write_bytes(damaged.replace(value, struct.pack("<f", 9.0)))
    pieces = read_shards(content, tmp_path / "last.ckpt")["w"]
    assert torch.equal(pieces.rows(0, 2), rows[:2])
    assert torch.equal(pieces.rows(4, 8), rows[4:])
    for use in (lambda: pieces.rows(1, 3), pieces.joined):
        with pytest.raises(InputError, match=r"its part .*parts_1/1.ckpt is damaged; take another checkpoint"):
            use()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["embedding_optimizer=rowwise_adagrad"], "embedding_optimizer needs sparse gradients"),
        (["compile=true", "network.execution=dense"], "compile=true: trainer=fsdp and fsdp_cpu shard"),
        (["weighting=pcgrad"], "weighting: trainer=fsdp and fsdp_cpu shard"),
        (["callbacks.conflict.every_n_steps=5"], "callbacks.conflict.every_n_steps=5: trainer=fsdp and fsdp_cpu shard"),
    ],
)
def test_what_needs_whole_parameters_is_refused(words: list[str], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check_options(composed(["trainer=fsdp_cpu", *words]))


def test_one_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this run has only one: use trainer=default"):
        build_trainer(compose_small(tmp_path, "trainer=fsdp_cpu", "trainer.devices=1"))
