"""The accepted values of options that no annotation of ours describes: those of torch, of Lightning or of no class."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import Field, with_config
from pytorch_lightning.accelerators import AcceleratorRegistry
from typing_extensions import TypedDict

from mtl.annotations import CONFIG
from mtl.options import (
    Count,
    CountOrZero,
    Dropout,
    Long,
    LongOrZero,
    Name,
    NotNegative,
    Number,
    Pair,
    Positive,
    RunSeed,
    Share,
)

Optional = Annotated[int, Field(ge=-1, le=10**9)] | None  # -1: no limit
Label = Annotated[
    str,
    Field(
        pattern=r"^[^/\x00-\x1f\x7f]*[^\s/\x00-\x1f\x7f][^/\x00-\x1f\x7f]*$",
        max_length=75,
        description="text of 1 to 75 characters, without / and control characters, since it names a folder",
    ),
]
DurationText = Annotated[
    str,
    Field(pattern=r"^\d{1,6}:\d\d:\d\d:\d\d$", description="a time such as 00:12:00:00 (days:hours:minutes:seconds)"),
]


@with_config(CONFIG)
class Units(TypedDict, total=False):
    """A length of time."""

    weeks: NotNegative
    days: NotNegative
    hours: NotNegative
    minutes: NotNegative
    seconds: NotNegative


@with_config(CONFIG)
class Distillation(TypedDict):
    """The section of this name."""

    teacher: Name | None
    weight: NotNegative
    layers: bool
    predictions: bool


TOP: dict[str, Any] = {
    "seed": RunSeed,
    "label": Label,
    "ckpt": Name | None,
    "evaluate": Name | None,
    "start_from": Name | None,
    "trust": list[Name] | None,
    "words": list[Name],
    "changed_data": Literal["refuse", "accept"],
    "choices": Mapping[str, Any],
    "threads": Annotated[int, Field(ge=1, le=1024)] | None,
    "compile": bool,
    "monitor": Name,
    "tested": Literal["best", "last"],
    "task_batches": bool,
    "distillation": Distillation,
    "paths": dict[str, Name],
}
OBJECTS = {  # sections that describe an object: whether they may be null
    "data": False,
    "network": False,
    "optimizer": False,
    "table_optimizer": True,
    "trainer": False,
    "bottom": True,
    "gate": True,
    "experts": True,
    "heads": True,
    "permutation": True,
    "weighting": True,
}
SEVERAL = ("callbacks", "logger")  # sections of sections, each of which describes an object
HYDRA: dict[str, Any] = {  # Hydra's own keys of a section with _target_
    "_partial_": bool,
    "_recursive_": bool,
    "_convert_": Literal["none", "partial", "object", "all"],
    "_args_": list[Any],
}
OPTIMIZER: dict[str, Any] = {
    "lr": Positive,
    "weight_decay": NotNegative,
    "momentum": NotNegative,
    "momentum_decay": NotNegative,
    "dampening": Number,
    "betas": Pair[Dropout],  # type: ignore[misc]  # mypy takes a generic alias for no value
    "lr_decay": NotNegative,
    "initial_accumulator_value": NotNegative,
    "rho": Share,
    "alpha": NotNegative,
}
Batches = LongOrZero | Share | None
SomeBatches = Long | Annotated[float, Field(gt=0, le=1)] | None
Devices = (
    Literal["auto", "-1", -1]
    | Annotated[int, Field(ge=1)]
    | Annotated[str, Field(pattern=r"^\d{1,6}(,\d{1,6})*,?$", description="device numbers")]
    | Annotated[list[CountOrZero], Field(min_length=1)]
)
Accelerator: Any = Literal.__getitem__(("auto", "cpu", "gpu", *AcceleratorRegistry.available_accelerators()))
FOREIGN: dict[str, dict[str, Any]] = {
    "pytorch_lightning.trainer.trainer.Trainer": {
        "accelerator": Accelerator,
        "devices": Devices,
        "num_nodes": Count,
        "fast_dev_run": bool | CountOrZero,
        "max_epochs": Optional,
        "min_epochs": LongOrZero | None,
        "max_steps": Annotated[int, Field(ge=-1, le=10**15)],
        "min_steps": LongOrZero | None,
        "max_time": DurationText | Units | timedelta | None,
        "limit_train_batches": SomeBatches,
        "limit_val_batches": Batches,
        "limit_test_batches": SomeBatches,
        "limit_predict_batches": Batches,
        "overfit_batches": LongOrZero | Share,
        "val_check_interval": SomeBatches | DurationText | Units,
        "check_val_every_n_epoch": Long | None,
        "num_sanity_val_steps": Optional,
        "log_every_n_steps": LongOrZero | None,
        "accumulate_grad_batches": Long,
        "gradient_clip_val": NotNegative | None,
        "gradient_clip_algorithm": Literal["value", "norm"] | None,
        "deterministic": bool | Literal["warn"] | None,
        "profiler": Literal["simple", "advanced", "pytorch", "xla"] | None,
        "reload_dataloaders_every_n_epochs": LongOrZero,
    },
    "pytorch_lightning.strategies.ddp.DDPStrategy": dict.fromkeys(
        ("find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view", "static_graph"), bool
    ),
    "pytorch_lightning.loggers.csv_logs.CSVLogger": {"flush_logs_every_n_steps": Long},
}
