"""Describe data in a checkpoint as plain data: text, numbers, lists and dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtl.checks import InputError, first_line
from mtl.files.cloud import CloudPath
from mtl.options import options_of, valid
from mtl.types import Bag, Categorical, DataSpec, Image, Numeric, TaskSpec, Tokens

INPUTS: dict[str, Any] = {kind.__name__: kind for kind in (Categorical, Bag, Numeric, Image, Tokens)}
TENSORS = ("counts",)  # fields of inputs that are tensors
LEFT_OUT = ("scorer", "calibration")  # a scorer needs texts, which are not stored; a calibration is no part of the data


def spec_state(spec: DataSpec) -> dict[str, Any]:
    """Return ``spec`` as plain data; the scorers of tasks are left out."""
    return {
        "inputs": {name: {"kind": type(item).__name__, **_fields(item)} for name, item in spec.inputs.items()},
        "tasks": [_fields(task) for task in spec.tasks],
        "extras": {
            name: {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
            for name, value in spec.ground_truth.items()
        },
    }


def spec_of(state: Mapping[str, Any]) -> DataSpec:
    """Return the DataSpec of a ``spec_state``; fields that this version does not know are left out."""
    inputs = {name: _build(INPUTS[values["kind"]], values) for name, values in state["inputs"].items()}
    ground_truth = {
        name: torch.tensor(values["values"], dtype=getattr(torch, values["dtype"]))
        for name, values in state["extras"].items()
    }
    return DataSpec(inputs, [_build(TaskSpec, task) for task in state["tasks"]], ground_truth)


def _fields(item: Any) -> dict[str, Any]:
    values = {entry.name: getattr(item, entry.name) for entry in fields(item) if entry.name not in LEFT_OUT}
    return {name: value.tolist() if isinstance(value, Tensor) else _as(list, value) for name, value in values.items()}


def _as(kind: type[list[Any]] | type[tuple[Any, ...]], value: Any) -> Any:
    """Return ``value`` with each list or tuple in it as a ``kind``."""
    return kind(_as(kind, entry) for entry in value) if isinstance(value, list | tuple) else value


def _build(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return an object of the dataclass ``kind``. Raises InputError for a field that does not fit its annotation."""
    annotations = {name: annotation for name, annotation in options_of(kind.__init__).items() if name not in LEFT_OUT}
    stored = {name: _as(tuple, value) for name, value in values.items()}
    stored |= {name: torch.tensor(values[name]) for name in TENSORS if values.get(name) is not None}
    location = "the checkpoint's description of its data: "
    names = [name for name in stored if name in annotations]
    return kind(**{name: valid(annotations[name], stored[name], location + name) for name in names})


@contextmanager
def reading_state() -> Iterator[None]:
    """Raise InputError for a state that does not have the form that this program writes."""
    try:
        yield
    except InputError:
        raise
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"the checkpoint's description of its data is damaged ({type(error).__name__}: {first_line(error)}); "
            "take another checkpoint of the run"
        ) from None


def describe_changes(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], sources: Mapping[str, Path]
) -> dict[str, str]:
    """Describe how each file differs from the file of the training; ``sources`` are the current files."""
    descriptions: dict[str, str] = {}
    for key in dict.fromkeys([*before, *now]):
        if key not in now:
            descriptions[key] = f"{key}={before[key]['name']} is not given"
        elif key not in before:
            descriptions[key] = f"{key}={sources[key]} was not given"
        elif before[key]["sha256"] != now[key]["sha256"]:
            unit = "rows" if isinstance(sources[key], CloudPath) else "bytes"
            new, old = (f"{files[key]['size']:,} {unit} in {files[key]['files']} files" for files in (now, before))
            descriptions[key] = f"{key}={sources[key]} has changed ({new}, before {old})"
    return descriptions
