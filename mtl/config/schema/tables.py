"""What those options accept that no annotation of ours describes: of no class, or of a class of torch or Lightning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pytorch_lightning.accelerators import AcceleratorRegistry

from mtl.kinds import (
    MANY,
    Choice,
    Described,
    Fields,
    Flag,
    Kind,
    ListOf,
    MapOf,
    Null,
    Number,
    OneOf,
    Row,
    Text,
    Whole,
)

BILLION = 1_000_000_000
NULL = Null()


def or_null(kind: Kind) -> Kind:
    """Return the kind of the values of ``kind``, and null."""
    return OneOf((kind, NULL))


@dataclass(frozen=True)
class Label(Kind):
    """The name of a run, which becomes a part of the name of its folder (at most 255 bytes)."""

    @property
    def text(self) -> str:
        return "text of 1 to 150 bytes, without / and control characters, since it names a folder"

    def accepts(self, value: Any) -> bool:
        fits = isinstance(value, str) and value.isprintable() and "/" not in value and bool(value.strip())
        return fits and len(value.encode()) <= 150


@dataclass(frozen=True)
class Duration(Kind):
    """A length of time, as Lightning reads it."""

    @property
    def text(self) -> str:
        return "a time such as 00:12:00:00 (days:hours:minutes:seconds) or {hours: 12}"

    def accepts(self, value: Any) -> bool:
        if isinstance(value, str):
            return re.fullmatch(r"\d{1,6}:\d\d:\d\d:\d\d", value) is not None
        units = ("weeks", "days", "hours", "minutes", "seconds")
        return isinstance(value, dict) and Fields(dict.fromkeys(units, Number(0, BILLION))).accepts(value)


@dataclass(frozen=True)
class Batches(Kind):
    """A number of batches, or a share of them; ``zero``: none is allowed."""

    zero: bool = True

    @property
    def text(self) -> str:
        return f"a whole number of batches (or a share of them, {'from 0' if self.zero else 'above 0 and up'} to 1)"

    def accepts(self, value: Any) -> bool:
        if not Number(0, above=not self.zero).accepts(value):
            return False
        return bool(value <= 1) or float(value).is_integer()


@dataclass(frozen=True)
class Devices(Kind):
    """How many devices, or which."""

    @property
    def text(self) -> str:
        return "a number of at least 1, -1 or auto for all, or a list of device numbers such as [0,1]"

    def accepts(self, value: Any) -> bool:
        if isinstance(value, str):
            return value in ("auto", "-1") or re.fullmatch(r"\d{1,6}(,\d{1,6})*,?", value) is not None
        if isinstance(value, list | tuple):
            return ListOf(Whole(0, MANY), 1).accepts(value) and len(set(value)) == len(value)
        return value != 0 and Whole(-1).accepts(value)


COUNT, COUNT_OR_ZERO, LONG = Whole(1, MANY), Whole(0, MANY), Whole(1, BILLION)
UNITS = ListOf(COUNT)
POSITIVE, NOT_NEGATIVE = Number(0, above=True), Number(0)
BELOW_ONE = Number(0, 1, below=True)
EPOCHS, STEPS = or_null(Whole(-1, BILLION)), or_null(Whole(0, BILLION))  # -1: no limit
NAME, SECTION = Text(1), or_null(Described())

TOP: dict[str, Kind] = {
    "seed": Whole(0, 2**32 - 1),
    "label": Label(),
    "ckpt": or_null(NAME),
    "evaluate": or_null(NAME),
    "start_from": or_null(NAME),
    "trust": or_null(ListOf(NAME)),
    "changed_data": Choice(("refuse", "accept")),
    "choices": Fields({}, extra=True),
    "words": ListOf(NAME),
    "threads": or_null(Whole(1, 1024)),
    "compile": Flag(),
    "monitor": NAME,
    "tested": Choice(("best", "last")),
    "task_batches": Flag(),
    "distillation": Fields(
        {"teacher": or_null(NAME), "weight": NOT_NEGATIVE, "layers": Flag(), "predictions": Flag()},
        required=frozenset(("teacher", "weight", "layers", "predictions")),
    ),
    "paths": Fields(dict.fromkeys(("data_dir", "output_dir", "run_dir"), NAME), extra=True),
}

# Sections that describe an object. Of some a factory is described, which has _partial_: true
OBJECTS: dict[str, Kind] = {
    "data": Described(),
    "network": Described(),
    "optimizer": Described(),
    "trainer": Described(),
    "gate": SECTION,
    "experts": SECTION,
    "permutation": SECTION,
    "weighting": SECTION,
}
FACTORIES = ("gate", "experts", "permutation", "optimizer", "weighting")
SEVERAL = ("callbacks", "logger")  # sections of sections, each of which describes an object
BUILT = ("data", "trainer", *SEVERAL)  # as they are described

RECIPE: dict[str, Kind] = {
    "num_experts": COUNT,
    "k": COUNT,
    "static_gate": Flag(),
    "embedding_dim": COUNT,
    "convolutions": ListOf(MapOf(COUNT_OR_ZERO)),
    "expert_units": UNITS,
    "head_units": UNITS,
    "dropout": BELOW_ONE,
    "batch_size": LONG,
    "learning_rate": POSITIVE,
    "max_epochs": EPOCHS,
    "patience": Whole(0, BILLION),
    "comet": Fields({"gamma": POSITIVE, "entropy_weight": NOT_NEGATIVE}, extra=True),
    "dselect_k": Fields({"gamma": POSITIVE, "entropy_weight": NOT_NEGATIVE}, extra=True),
    "softmax_selector": Fields({"entropy_weight": NOT_NEGATIVE}, extra=True),
    "gumbel_softmax": Fields({"sparsity_weight": NOT_NEGATIVE}, extra=True),
    "gumbel_matrix": Fields(
        {"initial_probability": Number(0, 1, above=True, below=True), "budget_weight": NOT_NEGATIVE}, extra=True
    ),
    "permutation": Fields({"epochs": or_null(POSITIVE), "entropy_weight": NOT_NEGATIVE}, extra=True),
}

_LIMIT = or_null(Batches())
_ACCELERATORS = tuple(dict.fromkeys(("auto", "cpu", "gpu", *AcceleratorRegistry.available_accelerators())))
TRAINER: dict[str, Kind] = {
    "accelerator": OneOf((Choice(_ACCELERATORS), Described())),
    "strategy": NAME,
    "devices": Devices(),
    "num_nodes": Whole(1, MANY),
    "fast_dev_run": OneOf((Flag(), COUNT_OR_ZERO)),
    "max_epochs": EPOCHS,
    "min_epochs": STEPS,
    "max_steps": Whole(-1, 10**15),
    "min_steps": STEPS,
    "max_time": or_null(Duration()),
    "limit_train_batches": or_null(Batches(zero=False)),
    "limit_val_batches": _LIMIT,
    "limit_test_batches": or_null(Batches(zero=False)),
    "limit_predict_batches": _LIMIT,
    "overfit_batches": Batches(),
    "val_check_interval": OneOf((Batches(zero=False), Duration(), NULL)),
    "check_val_every_n_epoch": or_null(LONG),
    "num_sanity_val_steps": EPOCHS,
    "log_every_n_steps": STEPS,
    "accumulate_grad_batches": LONG,
    "gradient_clip_val": or_null(NOT_NEGATIVE),
    "gradient_clip_algorithm": or_null(Choice(("value", "norm"))),
    "deterministic": OneOf((Flag(), Choice(("warn",)), NULL)),
    "profiler": or_null(Choice(("simple", "advanced", "pytorch", "xla"))),
    "reload_dataloaders_every_n_epochs": Whole(0, BILLION),
}
OPTIMIZER: dict[str, Kind] = {
    "lr": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "momentum": NOT_NEGATIVE,
    "momentum_decay": NOT_NEGATIVE,
    "dampening": Number(),
    "betas": Row((BELOW_ONE, BELOW_ONE)),
    "lr_decay": NOT_NEGATIVE,
    "initial_accumulator_value": NOT_NEGATIVE,
    "rho": Number(0, 1),
    "alpha": NOT_NEGATIVE,
}
_MODE = Choice(("min", "max"))
_DDP = ("find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view", "static_graph")
CLASSES: dict[str, dict[str, Kind]] = {
    "pytorch_lightning.trainer.trainer.Trainer": TRAINER,
    "pytorch_lightning.callbacks.early_stopping.EarlyStopping": {
        "monitor": NAME,
        "patience": Whole(0, BILLION),
        "min_delta": Number(),
        "mode": _MODE,
    },
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint": {
        "monitor": or_null(NAME),
        "dirpath": or_null(NAME),
        "filename": or_null(NAME),
        "mode": _MODE,
        "save_top_k": Whole(-1, MANY),
        "every_n_train_steps": STEPS,
        "every_n_epochs": STEPS,
        "train_time_interval": SECTION,
    },
    "pytorch_lightning.callbacks.progress.rich_progress.RichProgressBar": {
        "refresh_rate": Whole(0, BILLION),
        "console_kwargs": or_null(MapOf()),
    },
    "pytorch_lightning.callbacks.progress.tqdm_progress.TQDMProgressBar": {"refresh_rate": Whole(0, BILLION)},
    "pytorch_lightning.strategies.ddp.DDPStrategy": dict.fromkeys(_DDP, Flag()),
    "mtl.loggers.csv.CSVLog": {"save_dir": NAME, "flush_logs_every_n_steps": LONG},
    "pytorch_lightning.loggers.csv_logs.CSVLogger": {"save_dir": NAME, "flush_logs_every_n_steps": LONG},
    "pytorch_lightning.loggers.tensorboard.TensorBoardLogger": {"save_dir": NAME},
}


def of_class(name: str) -> dict[str, Kind]:
    """Return the kinds of the options of the class with this dotted name, where its annotations are too loose."""
    return OPTIMIZER if name.startswith("torch.optim.") else CLASSES.get(name, {})
