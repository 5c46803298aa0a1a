"""Train from Python: ``mtl.fit(frame, tasks={"clicked": "binary"})`` is ``mtl train data=table`` on a DataFrame."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.utilities.seed import isolate_rng

from mtl.callbacks.epoch_bar import EpochBar
from mtl.checkpoints.files import Checkpoint, read, read_to_resume
from mtl.checkpoints.trust import classes_in
from mtl.checks import InputError, first_line, format_value, require
from mtl.config import resolvers
from mtl.config.compose import CONF, composed, opened, with_default_recipe
from mtl.config.hydra_errors import explain
from mtl.config.resume import config_to_load, resumed_config
from mtl.data_modules.tables.cells import digest_of
from mtl.files.escaping import escape_interpolation
from mtl.files.run_files import CHECKPOINTS, COMMAND, read_json
from mtl.files.writing import write_json
from mtl.options import FilePath
from mtl.options import valid as checked
from mtl.overrides import to_plain, write_override
from mtl.pipeline.run import run
from mtl.pipeline.run_lock import lock_run_folder, unlock_run_folder
from mtl.python.keywords import options_of, with_options
from mtl.runs.caller import PythonCaller
from mtl.runs.signals import Stopped
from mtl.use.frames import is_pandas, to_polars
from mtl.use.trained import TrainedModel, model_of

Rows = Any  # a DataFrame of polars or pandas, a dict of columns, or the path of a file, a folder or a pattern
# The option for the file of a split, and what messages call its rows if they are in memory
PLACES = {"train": ("data.path", "frame"), "val": ("data.val_path", "valid"), "test": ("data.test_path", "test")}
DEFAULT_SPLIT_FRACTION = 0.1  # of the rows, for each of validation and test
VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")  # that Lightning sets
LIGHTNING = ("pytorch_lightning.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero")  # loggers


def fit(
    frame: Rows,
    tasks: Mapping[str, str | Mapping[str, Any]],
    *,
    gate: str | None = None,
    max_epochs: int | None = None,
    seed: int | None = None,
    valid: Rows | float | None = None,
    test: Rows | float | None = None,
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
    config_dir: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> TrainedModel:
    """Train a network on the rows of a table, test its best state, and return it.

    ``frame``: a DataFrame of polars or pandas, a dict of columns, or the path of a CSV or Parquet file or of a folder
    of such files. ``tasks``: the kind of each task, "binary", "multiclass" or "regression", or its options, as in
    ``{"kind": "regression", "column": "minutes", "weight": 0.1, "metrics": ["mae"]}``; by default the column has the
    name of the task. NaN, None and empty cells are missing labels and missing inputs. All other columns are inputs.
    ``valid`` and ``test``: rows of their own, or shares of the rows of ``frame``, by default 0.1 each.

    ``keywords`` are options of the command line by their last names, such as ``batch_size=256``, ``lr=3e-4``, ``k=4``,
    ``network="shared_bottom"`` or ``ignore=["id"]``: see ``mtl.python.keywords.options_of``. ``options`` takes all
    options by their full names, as in ``{"optimizer.lr": 3e-4}``. ``config_dir``: a folder with YAML files of your own.

    The run writes into ``folder``, which must be new, and at its end ``report.html`` unless ``report=False``; without
    a folder, its files last as long as the model that is returned. ``resume``: the folder of a run that was stopped or
    killed, which goes on with the same rows and tasks as if it had not been; options that are not given are those of
    the run. ``progress`` shows a bar. After Ctrl-C, the best state so far is tested and returned.
    The result equals that of ``mtl train data=table`` with the same options to the last bit. Raises InputError, a
    ValueError, for wrong input.
    """
    wanted = "must be a dict of names and kinds, as in {'clicked': 'binary'}"
    require(isinstance(tasks, Mapping), f"tasks={format_value(tasks)}: {wanted}")
    options = checked(Mapping[str, Any] | None, options, "options")
    folder, resume = checked(FilePath | None, folder, "folder"), checked(FilePath | None, resume, "resume")
    require("${" not in str(folder), f"folder={folder}: must be a path without ${{")
    config_dir = checked(FilePath | None, config_dir, "config_dir")
    require(config_dir is None or Path(config_dir).is_dir(), f"config_dir={config_dir}: no such folder")
    require(max_epochs != 0, "max_epochs=0 trains nothing: give at least 1")
    require(folder is None or resume is None, "folder and resume: give one or the other")
    rows_by_split = {"train": frame, "val": valid, "test": test}
    shares = {split: rows for split, rows in rows_by_split.items() if isinstance(rows, float)}
    tables = {split: rows for split, rows in rows_by_split.items() if rows is not None and split not in shares}
    values = {"data": "table", **options_of(keywords, CONF)}
    named = {"gate": gate, "seed": seed, "trainer.max_epochs": max_epochs}
    values |= {option: value for option, value in named.items() if value is not None}
    values |= {PLACES[split][0]: rows if is_path(rows) else PLACES[split][1] for split, rows in tables.items()}
    if shares:
        rest = [shares.get(split, 0.0 if split in tables else DEFAULT_SPLIT_FRACTION) for split in ("val", "test")]
        twice = "fractions" in checked(Mapping[str, Any], values.get("data.split") or {}, "split")
        require(not twice, "split: fractions are given twice, also by valid or test; give them once")
        named_shares = ", ".join(f"{PLACES[split][1]}={share:g}" for split, share in shares.items())
        fits = all(0 < share < 1 for share in shares.values()) and sum(rest) < 1
        require(fits, f"{named_shares}: shares must be between 0 and 1, and leave rows to train with")
        values["data.split.fractions"] = [1 - sum(rest), *rest]
    values["data.tasks"] = {str(name): kind for name, kind in tasks.items()}
    values = with_options(values, options)
    page = {} if folder is None else {"report": True}
    values = page | {"callbacks.progress": None} | values
    values = escape_interpolation(to_plain(values))
    frames = {split: to_polars(rows) for split, rows in tables.items() if not is_path(rows)}
    in_memory = values["data"] == "table" or not frames
    require(in_memory, f"data={values['data']} reads files: give the path of the rows, not the rows")
    digests = {split: digest_of(rows) for split, rows in frames.items()}
    with ExitStack() as ending:
        checkpoint = None if resume is None else read_to_resume(resume)
        lasting = folder if checkpoint is None else resolvers.run_folder(str(checkpoint.path))
        require(resume is None or lasting is not None, f"resume={resume}: is not in the folder of a run")
        temporary = ending.enter_context(ExitStack())
        run_folder = Path(lasting or tempfile.mkdtemp(prefix="mtl-fit-"))
        if lasting is None:
            temporary.callback(shutil.rmtree, run_folder, ignore_errors=True)
        trust = [*(values.get("trust") or []), *classes_in([config_dir] if config_dir else [])]
        cfg = _composed(values, config_dir, run_folder, checkpoint, trust)
        bars = [EpochBar()] if progress else []
        caller = PythonCaller(frames=frames, callbacks=bars, folder=Path(lasting) if lasting else None)
        ending.enter_context(_undisturbed(caller))
        lock = lock_run_folder(run_folder, checkpoint is not None, caller)
        ending.callback(unlock_run_folder, run_folder, lock, delete_empty=lasting is not None)
        if checkpoint is None:
            choices = OmegaConf.to_container(cfg.choices)
            record = {"overrides": list(cfg.overrides), "choices": choices, "seed": cfg.seed, "rows": digests}
            write_json(run_folder / COMMAND, record)
        else:
            cfg.ckpt = str(checkpoint.path)
            same = read_json(run_folder / COMMAND).get("rows", {}) == digests
            require(same, f"resume={resume}: the run has other rows; give those that it was begun with")
        run(cfg, caller=caller, checkpoint=checkpoint)
        tested_checkpoint = read(run_folder, cfg.test_checkpoint)
        model = model_of(tested_checkpoint, config_to_load(tested_checkpoint, trust))
        unused = "last*" if lasting is None and cfg.test_checkpoint != "last" else ""  # no run resumes from them
        for last in (run_folder / CHECKPOINTS).glob(unused) if unused else ():
            last.unlink()
        weakref.finalize(model.network, temporary.pop_all().close)  # which copies of the model share
        return replace(model, pandas=is_pandas(frame))


def _composed(
    values: Mapping[str, Any],
    config_dir: str | Path | None,
    folder: Path,
    checkpoint: Checkpoint | None,
    trust: Sequence[str],
) -> DictConfig:
    """Return the configuration of the run in ``folder`` that the options ``values`` choose, and a ``checkpoint``'s.

    Raises InputError for an unknown option, or for one that must not differ from the checkpoint's.
    """
    chosen = {option: write_override(option, value, os.path.isdir(CONF / option)) for option, value in values.items()}
    overrides, searched = [text for text in chosen.values() if text is not None], []
    if config_dir:
        searched = [f"file://{Path(config_dir).absolute()}"]
    if checkpoint is None:
        overrides = with_default_recipe(overrides, searched)
    unwritten = [option for option, text in chosen.items() if text is None]  # such as names with spaces

    def compose(overrides: Sequence[str]) -> DictConfig:
        cfg = composed(overrides)
        for option in unwritten:
            OmegaConf.update(cfg, option, values[option])
        if OmegaConf.is_interpolation(cfg, "run_name"):
            names = (cfg.choices[group] for group in ("network", "gate", "weighting"))
            cfg.run_name = resolvers.default_run_name(*names, _root_=cfg)
        cfg.paths.run_dir = str(folder)
        return cfg

    with own_hydra(searched):
        try:
            if checkpoint is None:
                return compose(overrides)
            return resumed_config(checkpoint, overrides, compose, trust, options=unwritten)
        except Exception as error:
            sentence = explain(error, overrides)
            if sentence is None and not isinstance(error, OmegaConfBaseException | InputError | OSError):
                raise
            raise InputError(sentence or first_line(error)) from None


@contextmanager
def own_hydra(searched: Iterable[str] = ()) -> Iterator[None]:
    """Compose with a Hydra of our own, and leave that of the caller's program, if it has one, as it is."""
    theirs, version = GlobalHydra.instance().hydra, VersionBase.instance().getbase()
    GlobalHydra.instance().clear()
    try:
        with opened(searched):
            yield
    finally:
        GlobalHydra.instance().hydra = theirs
        VersionBase.instance().version_base = version


@contextmanager
def _undisturbed(caller: PythonCaller) -> Iterator[None]:
    """Leave random numbers, variables and signals of the caller's program as they are; make Lightning quiet."""
    variables = {name: os.environ.pop(name, None) for name in VARIABLES}
    levels = {name: logging.getLogger(name).level for name in LIGHTNING}
    try:
        for name in LIGHTNING:
            logging.getLogger(name).setLevel(logging.WARNING)
        with isolate_rng(), caller.signals.listening():
            yield
    except Stopped as stopped:
        lost = f"stopped by {signal.Signals(stopped.number).name}; without folder=, nothing is kept"
        message = lost if caller.folder is None else str(stopped)
        if stopped.number == signal.SIGINT:
            raise KeyboardInterrupt(message) from None
        raise Stopped(message, stopped.number) from None
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def is_path(rows: Rows) -> bool:
    return isinstance(rows, str | Path)
