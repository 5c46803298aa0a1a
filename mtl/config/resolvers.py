"""OmegaConf resolvers, which ``conf/`` calls as ``${NAME:...}``: the folder and the label of a run.

Imports nothing slow, so that ``--help`` is answered at once.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from mtl.files.escaping import unescape_interpolation

# The rank is set by torchrun, by SLURM, or by Lightning when it starts the other processes
RANK = next((os.environ[key] for key in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if os.environ.get(key)), "0")


def is_first() -> bool:
    """Return whether this process has rank 0, the only one that writes files."""
    return RANK == "0"


def run_dir(ckpt: str | None, evaluate: str | None, stem: str, name: str) -> str:
    """Return the folder of a run: that of the run it resumes, or else a new folder ``<stem>_<name>``.

    Processes other than rank 0 get a temporary folder.
    """
    if not is_first():
        folder = tempfile.mkdtemp(prefix="mtl-rank-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
    resumed = run_folder(ckpt) if ckpt else None
    return str(resumed) if resumed else new_folder(f"{stem}_{'evaluate' if evaluate else name}"[:200])


def run_folder(checkpoint: str) -> Path | None:
    """Return the run folder that ``checkpoint`` names or lies in, or None."""
    path = Path(unescape_interpolation(str(checkpoint))).absolute()
    folder = path if path.is_dir() else path.parent.parent
    is_named = path.is_dir() or path.parent.name == "checkpoints"
    return folder if is_named and (folder / "config.yaml").is_file() else None


def new_folder(path: str) -> str:
    """Create a new folder and return its path: the first of ``path``, ``path_2``, ``path_3``, ... that is free."""
    for number in itertools.count(1):
        folder = path if number == 1 else f"{path}_{number}"
        try:
            os.makedirs(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise
        else:
            return folder
    raise AssertionError


def default_run_name(network: str, gate: str, weighting: str, *, _root_: DictConfig) -> str:
    """Return a run's network, gate and weighting as one name; the defaults mmoe and fixed are left out."""
    gated = network == "mmoe" or (_root_.network and "gate" in _root_.network)
    names = [network if network != "mmoe" else "", gate if gated else "", weighting if weighting != "fixed" else ""]
    return "_".join(filter(None, names))


def may_idle(task_batches: bool, network: str) -> bool:
    """Return whether a step may give parameters no gradient: those of absent tasks, or of components without a task."""
    return task_batches or network.endswith(".RoutedNetwork")


def register() -> None:
    """Register the resolvers, and the sections in which users choose the names of options, with Hydra."""
    OmegaConf.register_new_resolver("default_run_name", default_run_name, replace=True)
    OmegaConf.register_new_resolver("may_idle", may_idle, replace=True)
    OmegaConf.register_new_resolver("run_dir", run_dir, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("new_folder", new_folder, replace=True, use_cache=True)
    # The user names tasks and columns. Without this, Hydra would require a + before data.tasks.NAME={...}
    for name, options in {"open_tasks": ("tasks",), "open_table": ("tasks", "columns")}.items():
        data = {option: OmegaConf.create({}, flags={"struct": False}) for option in options}
        ConfigStore.instance().store(name=name, node=OmegaConf.create({"data": data}))
