"""Train, test and report: ``python train.py gate=comet data=movielens``. All options are in ``conf/``.

Slow imports are inside functions, so that ``--help`` and a mistyped option are answered at once.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

log = logging.getLogger("mtl")

HARMLESS_WARNINGS = (
    ".*does not have many workers.*",  # batches are slices of tensors in memory: workers would only copy them
    ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run writes to its own folder
    ".*The dirpath has changed.*",  # a run that only evaluates has a folder of its own, and writes no checkpoint
    ".*isinstance.treespec, LeafSpec.*",  # inside Lightning
    ".*monitor=.val/loss.* could not find the monitored key.*",  # if a run ends within its first epoch, _run warns
    ".*Early stopping conditioned on metric .val/loss. .*",  # the same
    ".*smaller than the logging interval.*",  # with little data, the values per epoch suffice
    ".*Grad strides do not match bucket view strides.*",  # the stride of a dimension of size 1 means nothing
    ".*recommended to use .self.log.*sync_dist.*",  # the logged values are already sums over all processes
)


# Only rank 0 writes files. torchrun, SLURM, or Lightning when it starts the other processes, set the rank.
RANK = int(next((os.environ[key] for key in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if os.environ.get(key)), 0))


def run_dir(ckpt: str | None, evaluate: str | None, stem: str, name: str) -> str:
    """Return the folder of a run: that of the checkpoint it resumes from, else a new ``<stem>_<name>``.

    Processes other than rank 0 get a temporary folder.
    """
    if RANK:
        return tempfile.mkdtemp(prefix="mtl-")
    if ckpt:
        return str(Path(ckpt).absolute().parent.parent)
    default = f"{stem}_{'evaluate' if evaluate else name}"
    path, number = Path(default), 2
    while path.exists():
        path, number = Path(f"{default}_{number}"), number + 1
    return str(path)


OmegaConf.register_new_resolver("run_dir", run_dir, replace=True)

# The user names the tasks of a table. Without this, Hydra would require a + before data.tasks.NAME={...}
OPEN_TASKS = {"data": {"tasks": OmegaConf.create({}, flags={"struct": False})}}
ConfigStore.instance().store(name="open_tasks", node=OmegaConf.create(OPEN_TASKS))


def run(cfg: DictConfig) -> float | None:
    """Train ``cfg``'s network, or only test a checkpoint, and write results; return the best ``val/loss``."""
    from mtl import distributed, memory  # before anything imports torchvision: mtl makes it importable

    with warnings.catch_warnings():
        for message in HARMLESS_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        memory.keep_freed_memory()
        try:
            return _run(cfg)
        finally:
            distributed.destroy_process_group()


def _run(cfg: DictConfig) -> float | None:
    import pytorch_lightning as pl

    from mtl import fast
    from mtl.run import build, results
    from mtl.types import InputError, require

    require(isinstance(cfg.seed, int), f"seed={cfg.seed}: must be a whole number")
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    folder = Path(cfg.paths.run_dir)
    require(cfg.tested in ("best", "last"), f"tested={cfg.tested}: accepted are best, last")
    build.check_options(cfg)
    fast.enable(cfg.fast == "auto")
    data, trainer = build.build_data(cfg), build.build_trainer(cfg)
    require(
        trainer.world_size == 1 or HydraConfig.get().mode != RunMode.MULTIRUN,
        f"-m with {trainer.world_size} processes: each would run the whole sweep again. Use one device per job "
        "(trainer=default), or several devices without -m",
    )
    data.prepare_data()
    data.setup()
    network = build.build_network(cfg, data.spec)
    module = build.build_module(cfg, network, data.spec)
    log.info("%s: %s parameters, run folder %s", cfg.label, f"{results.count_parameters(network):,}", folder)
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.to_container(cfg, resolve=True), folder / "config.yaml")

    best: float | None = None
    checkpoint = cfg.evaluate
    if not checkpoint:
        trainer.fit(module, datamodule=data, ckpt_path=cfg.ckpt, weights_only=True)
        if trainer.interrupted:
            raise InputError(f"stopped by the user; resume with: python train.py ckpt={folder}/checkpoints/last.ckpt")
        saved = trainer.checkpoint_callback
        score = getattr(saved, "best_model_score", None)
        best = None if score is None else float(score)
        checkpoint = str(getattr(saved, "best_model_path", "")) or None
        if checkpoint is None:
            monitor = getattr(saved, "monitor", "val/loss")
            log.warning("no %s, since the run ended within its first epoch: testing the last weights", monitor)
        if cfg.tested == "last":
            checkpoint = str(trainer.strategy.broadcast(folder / "checkpoints" / "last.ckpt"))
    fit_metrics, epochs = dict(trainer.callback_metrics), trainer.current_epoch
    [test] = trainer.test(module, datamodule=data, ckpt_path=checkpoint, verbose=False, weights_only=True)
    record = results.collect(
        cfg.label, cfg.seed, checkpoint or "last weights", test, fit_metrics, network, epochs, best
    )
    if trainer.is_global_zero:
        results.write_json(folder / "results.json", record)
        results.print_results(record, folder)
    return best if best is not None else record["test"]["loss"]


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    from mtl.run.checkpoint import config_from_checkpoint, whole_checkpoint
    from mtl.types import InputError, Stopped

    hydra_cfg = HydraConfig.get()
    try:
        if RANK:
            logging.disable(logging.WARNING)
        start = cfg.ckpt or cfg.evaluate
        if cfg.ckpt:
            start = cfg.ckpt = str(whole_checkpoint(cfg.ckpt))
        if start:
            cfg = config_from_checkpoint(cfg, start, hydra_cfg.overrides.task, list(hydra_cfg.runtime.choices))
        else:
            with open_dict(cfg):
                cfg.label = str(cfg.label)  # resolve it: it refers to Hydra's choices, which a resumed run lacks
        return run(cfg)
    except Stopped as stop:
        log.warning("%s", stop)
        sys.exit(0 if RANK else 128 + stop.number)
    except InputError as error:
        if os.environ.get("HYDRA_FULL_ERROR"):
            raise
        raise CompactHydraException(f"error: {error}") from None


if __name__ == "__main__":
    main()
