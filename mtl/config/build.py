"""Turn the configuration into objects; the only place that calls Hydra's ``instantiate``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import hydra.utils
import torch
from hydra.errors import InstantiationException
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins import DoublePrecision
from torch import nn

from mtl.callbacks.default_callbacks import standard_callbacks
from mtl.callbacks.last_checkpoint import LastCheckpoint
from mtl.checkpoints.files import Checkpoint, CheckpointIO
from mtl.checks import InputError, first_line, require
from mtl.data_modules.base import TensorDataModule
from mtl.files.escaping import escape_interpolation, unescape_interpolation
from mtl.networks.base import MultiTaskNetwork, check_network
from mtl.networks.ensemble import Ensemble
from mtl.runs.caller import Caller
from mtl.training.distillation import Distillation
from mtl.training.module import MultiTaskModule
from mtl.training.weighting import Weighting
from mtl.types import Categorical, DataSpec

TRAINING = 0.5  # part of the time limit of a run that its training takes at most
SHARDED = "mtl.training.sharding.ShardedStrategy"
WRONG_ARGUMENTS = "unexpected keyword argument|missing .*required .*argument|multiple values for argument"


def build_data(cfg: DictConfig) -> TensorDataModule:
    """Return the data module of ``cfg.data``; nothing is read or fetched yet."""
    return _built(cfg, "data", TensorDataModule)


def check_options(cfg: DictConfig) -> None:
    """Construct gate and optimizer once, without data, so that their options are checked before any data is touched."""
    for name in ("optimizer", *(["embedding_optimizer"] if cfg.get("embedding_optimizer") else [])):
        try:
            _instantiate(cfg, name)([nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None
    _check_combinations(cfg)
    if "gate" not in cfg.network:
        return
    num_experts = cfg.network.get("num_experts") or cfg.recipe.num_experts
    names = map(unescape_interpolation, [cfg.gate.get("input_name") or "id", *(cfg.gate.get("columns") or ())])
    some = Categorical(1, counts=torch.ones(1))  # the data are not loaded yet: assume that ids are counted
    with torch.device("meta"), _plain_errors("gate"), _section("gate", cfg.gate):
        _instantiate(cfg, "gate")(num_tasks=1, num_experts=num_experts, input_dim=1, inputs=dict.fromkeys(names, some))


def _check_combinations(cfg: DictConfig) -> None:
    """Raise InputError if two choices do not go together."""
    trainer, execution = cfg.trainer, cfg.network.get("execution", "dense")
    compiled, tables, sharded = bool(cfg.get("compile")), bool(cfg.get("embedding_optimizer")), _is_sharded(cfg)
    weighting = _class_of(_weighting(cfg))
    compares = issubclass(weighting, Weighting) and weighting.needs_task_gradients  # gradients of tasks
    inside = compares and cfg.weighting.get("grad_wrt") == "representation"
    combines = compares and not inside  # writes gradients of parameters
    conflict = (cfg.callbacks.get("conflict") or {}).get("every_n_steps")
    gpus = trainer.accelerator in ("gpu", "cuda") or (trainer.accelerator == "auto" and torch.cuda.is_available())
    alone = cfg.task_batches and cfg.data.get("tasks_per_step", 1) == 1 and trainer.accumulate_grad_batches == 1
    why = ": trainer=fsdp and fsdp_cpu shard the parameters among the processes, "
    for wrong, message in (
        (
            compiled and execution != "dense",
            f"compile=true with network.execution={execution}: compiled code cannot choose experts by the routing; use "
            "network.execution=dense, or compile=false",
        ),
        (
            compiled and tables,
            "compile=true with embedding_optimizer: torch compiles no sparse gradients; use embedding_optimizer=none",
        ),
        (
            combines and tables,
            "weighting: this method combines dense gradients of the tasks, not the sparse ones of embedding_optimizer; "
            "use embedding_optimizer=none",
        ),
        (
            tables and gpus and not (trainer.devices == 1 and trainer.num_nodes == 1),
            "embedding_optimizer on several GPUs: NCCL does not add sparse gradients; use trainer.devices=1, or "
            "embedding_optimizer=none",
        ),
        # In float16 the trainer scales the loss, and later divides the gradients of the parameters by the same factor.
        # The gradients of single tasks, which such a method combines, would stay scaled
        (
            combines and str(trainer.precision) in ("16", "16-mixed"),
            f"trainer.precision={trainer.precision}: it scales the loss of a step, which is undefined for a weighting "
            "that combines the gradients of tasks; use trainer.precision=bf16-mixed or 32-true, or a method on losses "
            "such as weighting=uncertainty",
        ),
        (
            compares and alone,
            "weighting: this method compares the gradients of tasks, and a step of this data has the labels of one "
            "task; set data.tasks_per_step or trainer.accumulate_grad_batches to 2 or more, or use weighting=fixed",
        ),
        (
            sharded and tables,
            "embedding_optimizer needs sparse gradients, which FSDP does not support; use embedding_optimizer=none",
        ),
        (sharded and compiled, f"compile=true{why}which compiled code does not see; use compile=false"),
        (
            compiled and inside,
            "compile=true with weighting.grad_wrt=representation: compiled code hides the gradients at the experts' "
            "outputs; use compile=false, or weighting.grad_wrt=parameters",
        ),
        (
            inside and cfg.task_batches,
            "weighting.grad_wrt=representation: each task of this data has rows of its own, so the gradients at the "
            "experts have nothing in common; use weighting.grad_wrt=parameters",
        ),
        (sharded and compares, f"weighting{why}and this method combines whole gradients of tasks; use trainer=ddp"),
        (
            sharded and conflict,
            f"callbacks.conflict.every_n_steps={conflict}{why}and conflicts need whole ones; use trainer=ddp",
        ),
    ):
        require(not wrong, message)


def _is_sharded(cfg: DictConfig) -> bool:
    strategy = cfg.trainer.get("strategy")
    return isinstance(strategy, DictConfig) and strategy.get("_target_") == SHARDED


def _is_double(cfg: DictConfig) -> bool:
    return str(cfg.trainer.precision) in ("64", "64-true")


def build_network(cfg: DictConfig, spec: DataSpec, load_pretrained: bool = True) -> MultiTaskNetwork:
    """Return the network of ``cfg.network`` for data that looks like ``spec``, or an ensemble of such networks.

    ``load_pretrained=False``: its weights will come from a checkpoint, so a network that ``reads_files`` need not have
    them. The network's ``encoder_config`` is stored in ``cfg``, and so in every checkpoint. Raises InputError if it is
    no ``MultiTaskNetwork``.
    """
    with _plain_errors("network"):  # passed to a partial: Hydra would treat the dataclass as a configuration
        make = _instantiate(cfg, "network", _partial_=True)
        kind = _class_of(make)
        reads_files = issubclass(kind, MultiTaskNetwork) and kind.reads_files
        options = {"load_pretrained": load_pretrained} if reads_files else {}
        with _section("gate", cfg.get("gate") or {}), _section("network", cfg.network):
            members: list[MultiTaskNetwork] = [make(spec=spec, **options) for _ in range(cfg.get("ensemble", 1))]
    for member in members:
        check_network(member)
    network = members[0] if len(members) == 1 else Ensemble(members)
    if network.encoder_config:
        cfg.network.config = escape_interpolation(network.encoder_config)
    if cfg.get("compile"):
        logging.getLogger(__name__).info("the network is compiled on its first batch; this can take minutes")
        network.compile()
    return network


def build_module(
    cfg: DictConfig, network: MultiTaskNetwork, spec: DataSpec, distillation: Distillation | None = None
) -> MultiTaskModule:
    """Return the LightningModule that trains ``network`` on the tasks of ``spec``, and to imitate any teacher."""
    options: Any = OmegaConf.to_container(cfg, resolve=True)
    make = _weighting(cfg)
    weighting = make and make(network=network, num_tasks=len(spec.tasks), seed=cfg.get("seed", 0))
    tables = _instantiate(cfg, "embedding_optimizer") if cfg.get("embedding_optimizer") else None
    make_optimizer, reduction = _instantiate(cfg, "optimizer"), cast(Any, options.get("loss_reduction") or "tasks")
    module = MultiTaskModule(network, spec.tasks, make_optimizer, options, distillation, weighting, tables, reduction)
    # Lightning converts the module only after it has loaded the weights of a checkpoint, which would round them
    return module.double() if _is_double(cfg) else module


def _weighting(cfg: DictConfig) -> Callable[..., Weighting] | None:
    """Return the function that makes the weighting of a network; None if ``cfg`` has no such section."""
    return _instantiate(cfg, "weighting") if cfg.get("weighting") else None


def _class_of(factory: Any) -> type:
    """Return the class that a ``functools.partial`` makes objects of; object if it calls a function."""
    target = factory.func if isinstance(factory, partial) else None
    return target if isinstance(target, type) else object


def build_trainer(cfg: DictConfig, checkpoint: Checkpoint | None = None, caller: Caller | None = None) -> Trainer:
    """Return the Trainer with its callbacks, also those of the ``caller``, and loggers.

    ``checkpoint``: what it starts from.
    """
    caller = caller or Caller()
    names = [name for name, node in cfg.callbacks.items() if "_target_" in (node or ())]
    chosen = [_built(cfg, f"callbacks.{name}", Callback) for name in names]
    for callback in chosen:
        if isinstance(callback, LastCheckpoint):
            callback.caller = caller
    loggers = [_built(cfg, f"logger.{name}", Logger) for name, node in (cfg.get("logger") or {}).items() if node]
    has_progress_bar = bool(cfg.callbacks.get("progress"))  # else Lightning would add its own bar
    plugins: list[Any] = [CheckpointIO(checkpoint)]
    options: dict[str, Any] = {}
    if _is_sharded(cfg) and _is_double(cfg):  # Lightning refuses the override, but not what it stands for
        plugins, options = [*plugins, DoublePrecision()], {"precision": None}
    if cfg.get("time_limit"):
        options["max_time"] = {"seconds": TRAINING * cfg.time_limit}
    trainer: Trainer = _built(
        cfg,
        "trainer",
        Trainer,
        callbacks=[*standard_callbacks(caller.trial), *chosen, *caller.callbacks],
        logger=loggers or False,
        plugins=plugins,
        enable_progress_bar=has_progress_bar,
        **options,
    )
    require(
        trainer.world_size > 1 or not _is_sharded(cfg),
        "trainer=fsdp and fsdp_cpu shard the parameters among processes, and this run has only one: use "
        "trainer=default, or more trainer.devices",
    )
    return trainer


def build_part(section: str, node: Any, **kwargs: Any) -> Any:
    """Return the object that the ``node`` of ``section`` describes, such as the sampler of a study."""
    with _plain_errors(section):
        return hydra.utils.instantiate(node, _convert_="all", **kwargs)


def _instantiate(cfg: DictConfig, section: str, **kwargs: Any) -> Any:
    return build_part(section, OmegaConf.select(cfg, section), **kwargs)


def _built(cfg: DictConfig, section: str, kind: type, **kwargs: Any) -> Any:
    """Return the object that a section describes; InputError if it is not of this ``kind``, or only a part of one."""
    instance = _instantiate(cfg, section, **kwargs)
    hint = f"correct {section}._target_, and leave out {section}._partial_"
    require(isinstance(instance, kind), f"{section}: must describe a {kind.__name__}; {hint}")
    return instance


@contextmanager
def _section(name: str, node: Mapping[str, Any]) -> Iterator[None]:
    """Write ``gate.k`` in the message of an InputError that begins with ``k``: a class names its options alone."""
    try:
        yield
    except InputError as error:
        option = re.split("[=:]", str(error), maxsplit=1)[0]
        raise InputError(f"{name}.{error}" if option in node else str(error)) from None


@contextmanager
def _plain_errors(section: str) -> Iterator[None]:
    """Raise InputError for mistakes that the user can correct, instead of Hydra's wrapping exception.

    A wrapped InputError is raised unchanged. An unknown or missing option, or a value that Lightning rejects, becomes
    an InputError that names the ``section`` of the configuration.
    """
    try:
        yield
    except (InstantiationException, TypeError) as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, InputError):
                raise cause from None
            unknown = isinstance(cause, TypeError) and re.search(WRONG_ARGUMENTS, str(cause)) is not None
            missing = section == "weighting" and isinstance(cause, ImportError)
            refused = isinstance(cause, MisconfigurationException) or (
                section in ("trainer", "weighting") and isinstance(cause, TypeError | ValueError)
            )
            if missing:
                raise InputError(f"weighting: {cause}; all of it: pip install -e '.[weighting]'") from None
            if unknown or refused:
                raise InputError(f"{section}: {cause}") from None
            cause = cause.__cause__
        if isinstance(error, InstantiationException) and error.__cause__ is None:  # such as a target that Hydra refuses
            raise InputError(f"{section}: {first_line(error)}") from None
        raise
