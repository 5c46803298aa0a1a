"""The accepted values of options that no annotation of ours describes: those of torch, of Lightning or of no class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, with_config
from typing_extensions import TypedDict

from mtl.options import (
    CONFIG,
    EnsembleSize,
    LargeCount,
    LargeCountOrZero,
    LossReduction,
    Name,
    NonNegative,
    OpenFraction,
    Positive,
    RunSeed,
    matching,
)
from mtl.table_models import Choice
from mtl.training.thresholds import Rule

RunName = Annotated[
    str,
    matching(
        r"(?!\s*$)[^/\x00-\x1f\x7f\ud800-\udfff]{1,75}",
        "text of 1 to 75 characters, without / and control characters, since it names a folder",
    ),
]


@with_config(CONFIG)
class Distillation(TypedDict):
    """The section of this name."""

    teacher: Name | None
    weight: NonNegative
    layers: bool
    predictions: bool


TOP: dict[str, Any] = {
    "seed": RunSeed,
    "run_name": RunName,
    "ckpt": Name | None,
    "evaluate": Name | None,
    "start_from": Name | None,
    "trust": list[Name] | None,
    "overrides": list[Name],
    "on_data_change": Literal["error", "accept"],
    "choices": Mapping[str, Any],
    "threads": Annotated[int, Field(ge=1, le=1024)] | None,
    "ensemble": EnsembleSize,
    "loss_reduction": LossReduction | None,  # null in runs resumed from checkpoints without it: tasks
    "compile": bool,
    "monitor": Name,
    "test_checkpoint": Literal["best", "last"],
    "report": bool,
    "predictions": bool,
    "calibrate": bool,
    "threshold": Rule | None,
    "interval": OpenFraction | None,
    "task_batches": bool,
    "blend": Choice,
    "time_limit": Positive | None,
    "distillation": Distillation,
    "paths": dict[str, Name],
}
OBJECTS = {  # sections that describe an object: whether they may be null
    "data": False,
    "network": False,
    "optimizer": False,
    "embedding_optimizer": True,
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
SomeBatches = LargeCount | Annotated[float, Field(gt=0, le=1)] | None
FOREIGN: dict[str, dict[str, Any]] = {  # by class: options that Lightning does not check, or only when it is too late
    "pytorch_lightning.trainer.trainer.Trainer": {
        "limit_train_batches": SomeBatches,
        "limit_test_batches": SomeBatches,
        "val_check_interval": SomeBatches | str | dict[str, Any],
        "check_val_every_n_epoch": LargeCount | None,
        "num_sanity_val_steps": Annotated[int, Field(ge=-1, le=10**9)],
        "log_every_n_steps": LargeCountOrZero | None,
        "accumulate_grad_batches": LargeCount,
        "gradient_clip_val": NonNegative | None,
    },
    "pytorch_lightning.strategies.ddp.DDPStrategy": dict.fromkeys(
        ("find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view", "static_graph"), bool
    ),
}
