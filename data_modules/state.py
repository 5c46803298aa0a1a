"""Describe data in a checkpoint as plain data: text, numbers, lists and dicts."""

from __future__ import annotations

import hashlib
import json
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

from .files.reading import cloud_rows, files_of, regular_size

INPUTS: dict[str, Any] = {kind.__name__: kind for kind in (Categorical, Bag, Numeric, Image, Tokens)}
TENSORS = ("counts",)  # fields of inputs that are tensors
LEFT_OUT = ("scorer", "calibration")  # a scorer needs texts, which are not stored; a calibration is no part of the data
WHOLE = 1 << 30  # bytes of files whose fingerprint covers all of them
SAMPLES, SAMPLE = 16, 1 << 18  # samples of a file, and their bytes; a Parquet file ends with the range of each column


def spec_state(spec: DataSpec) -> dict[str, Any]:
    """Return ``spec`` as plain data; the scorers of tasks are left out."""
    return {
        "inputs": {name: {"kind": type(one).__name__, **_fields(one)} for name, one in spec.inputs.items()},
        "tasks": [_fields(task) for task in spec.tasks],
        "extras": {
            name: {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
            for name, value in spec.ground_truth.items()
        },
    }


def spec_of(state: Mapping[str, Any]) -> DataSpec:
    """Return the DataSpec of a ``spec_state``; fields that this version does not know are left out."""
    inputs = {name: _made(INPUTS[one["kind"]], one) for name, one in state["inputs"].items()}
    ground_truth = {
        name: torch.tensor(one["values"], dtype=getattr(torch, one["dtype"])) for name, one in state["extras"].items()
    }
    return DataSpec(inputs, [_made(TaskSpec, task) for task in state["tasks"]], ground_truth)


def _fields(item: Any) -> dict[str, Any]:
    values = {one.name: getattr(item, one.name) for one in fields(item) if one.name not in LEFT_OUT}
    return {name: value.tolist() if isinstance(value, Tensor) else _as(list, value) for name, value in values.items()}


def _as(kind: type[list[Any]] | type[tuple[Any, ...]], value: Any) -> Any:
    """Return ``value`` with each list or tuple in it as a ``kind``."""
    return kind(_as(kind, one) for one in value) if isinstance(value, list | tuple) else value


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return an object of the dataclass ``kind``. Raises InputError for a field that does not fit its annotation."""
    known = {name: annotation for name, annotation in options_of(kind.__init__).items() if name not in LEFT_OUT}
    given = {name: _as(tuple, value) for name, value in values.items()}
    given |= {name: torch.tensor(values[name]) for name in TENSORS if values.get(name) is not None}
    here = "the checkpoint's description of its data: "
    return kind(**{name: valid(known[name], value, here + name) for name, value in given.items() if name in known})


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


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the name of a file, a folder or a pattern, the bytes and the number of its files, and a SHA-256 digest.

    The digest covers the contents of the files (evenly spaced samples and the end of each if together they have more
    than ``WHOLE`` bytes), and the names of several files, but not of one. Of files in the cloud, it covers their names
    and numbers of rows, and the size is that number. Raises InputError if one cannot be read.
    """
    if isinstance(path, CloudPath):
        rows = cloud_rows(path)
        found = {"name": path.name, "size": sum(rows.values()), "files": len(rows)}
        return found | {"sha256": hashlib.sha256(json.dumps(rows).encode()).hexdigest()}
    files, digest = files_of(path), hashlib.sha256()
    sizes = [regular_size(file) for file in files]
    for file, size in zip(files, sizes, strict=True):
        digest.update(file.name.encode() + b"\0" if len(files) > 1 else b"")  # one file may be renamed
        places = range(0, size, max(SAMPLE, size // SAMPLES) if sum(sizes) > WHOLE else SAMPLE)
        try:
            with open(file, "rb") as content:
                for start in (*places, max(0, size - SAMPLE)):
                    content.seek(start)
                    digest.update(content.read(SAMPLE))
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror or error}") from None
    return {"name": path.name, "size": sum(sizes), "sha256": digest.hexdigest(), "files": len(files)}


def changes(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], sources: Mapping[str, Path]
) -> dict[str, str]:
    """Describe how each file differs from the file of the training; ``sources`` are the current files."""
    found: dict[str, str] = {}
    for key in dict.fromkeys([*before, *now]):
        if key not in now:
            found[key] = f"{key}={before[key]['name']} is not given"
        elif key not in before:
            found[key] = f"{key}={sources[key]} was not given"
        elif before[key]["sha256"] != now[key]["sha256"]:
            unit = "rows" if isinstance(sources[key], CloudPath) else "bytes"
            new, old = (f"{one[key]['size']:,} {unit} in {one[key]['files']} files" for one in (now, before))
            found[key] = f"{key}={sources[key]} has changed ({new}, before {old})"
    return found
