"""The register of private or undocumented names of other libraries that this program touches.

Each entry says why the name is used and what happens without it. After an upgrade, ``tests/unit/test_compat.py`` shows
which entries broke. ``lookup`` is for names with a fallback: it returns None if the installed version lacks the name or
if the name behaves differently.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf


@dataclass(frozen=True)
class PrivateName:
    """A name, why it is used, what happens without it, how to find it, and a small call that must succeed."""

    why: str
    fallback: str
    find: Callable[[], Any]
    works: Callable[[Any], bool]


@cache
def lookup(name: str) -> Any:
    """Return the object that ``name`` in ``REGISTER`` stands for, or None if it is missing or its check fails."""
    entry = REGISTER[name]
    try:
        found = entry.find()
        return found if entry.works(found) else None
    except Exception:  # an upgrade may have changed anything; the fallback always works
        return None


def config_path(node: DictConfig) -> str:
    """Return the dotted name of a node of the configuration; "" if it cannot be determined."""
    full_key = lookup("omegaconf.DictConfig._get_full_key")
    return str(full_key(node, None)) if full_key else ""


def _requirement_works(cache: Any) -> bool:
    here = cache("torch")
    return bool(here) and not bool(cache("no-such-package")) and here.requirement == "torch"


def _tiny_bert() -> Any:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    return importlib.import_module("transformers").BertConfig(**sizes)


REGISTER = {
    "omegaconf.DictConfig._get_full_key": PrivateName(
        why="error messages name the section of the configuration that an option is in",
        fallback="messages without the section",
        find=lambda: DictConfig._get_full_key,
        works=lambda get: get(OmegaConf.create({"a": {"b": {}}}).a.b, None) == "a.b",
    ),
    "lightning_utilities.core.imports.RequirementCache": PrivateName(
        why="torchmetrics asks it whether transformers is installed, and if so imports it, which takes seconds",
        fallback="every run imports transformers wherever it is installed",
        find=lambda: importlib.import_module("lightning_utilities.core.imports").RequirementCache,
        works=_requirement_works,
    ),
    "pytorch_lightning.Trainer.fit_loop.epoch_loop": PrivateName(
        why="a resumed run has to know at which batch of the epoch, and of the accumulated step, it stands",
        fallback="none: training stops",
        find=lambda: importlib.import_module("pytorch_lightning.loops.training_epoch_loop")._TrainingEpochLoop,
        works=lambda loop: hasattr(loop, "batch_idx") and "batch_progress" in inspect.getsource(loop.__init__),
    ),
    "pytorch_lightning.Trainer.callback_metrics": PrivateName(
        why="values that no single module logs, such as means over tasks, are put into this dictionary for monitors",
        fallback="none: monitors miss these values",
        find=lambda: importlib.import_module("pytorch_lightning").Trainer.callback_metrics.fget,
        works=lambda getter: "_logger_connector.callback_metrics" in inspect.getsource(getter),
    ),
    "transformers.BertLayer": PrivateName(
        why="network=transformer takes the attention of an encoder's layers and replaces their feed-forward part",
        fallback="none: network=transformer does not build",
        find=lambda: importlib.import_module("transformers").BertModel(_tiny_bert()).encoder.layer[0],
        works=lambda layer: all(
            hasattr(part, name)
            for part, names in (
                (layer.attention, ("self", "output")),
                (layer.intermediate, ("dense",)),
                (layer.output, ("dense", "LayerNorm", "dropout")),
            )
            for name in names
        ),
    ),
}

# Operators that torchvision's Python code refers to while it is imported. If torchvision's compiled library does not
# fit the installed torch (a CUDA build beside a CPU torch), nobody has declared them: the import of torchvision fails,
# and with it that of torchmetrics and Lightning.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library: torch.library.Library | None = None  # the declarations live as long as this object


def prepare_imports() -> None:
    """Make torchvision, Lightning and torchmetrics importable; each package that imports one calls this."""
    _register_missing_operators()
    _import_torchmetrics()


def _register_missing_operators() -> None:
    """Declare the operators of torchvision that are missing; do nothing where it loads or is not installed.

    The declared operators can be traced but not called.
    """
    global _library
    if _library is not None or "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # remove the partly imported package
        _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types for it
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                _library.define(name + schema)  # type: ignore[no-untyped-call]  # torch has no types for it


def _import_torchmetrics() -> None:
    """Import torchmetrics without ``transformers``, which only its metrics of generated texts need.

    This has to run before anything else imports torchmetrics, as Lightning does.
    """
    if "torchmetrics" in sys.modules or importlib.util.find_spec("transformers") is None:
        return
    requirement = lookup("lightning_utilities.core.imports.RequirementCache")
    if requirement is None:
        return
    is_met = requirement.__bool__
    requirement.__bool__ = lambda self: not str(self.requirement).startswith("transformers") and is_met(self)
    try:
        importlib.import_module("torchmetrics")
    finally:
        requirement.__bool__ = is_met
