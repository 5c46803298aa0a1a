"""Keep tensors that several processes divide in a file of each process, beside an ordinary checkpoint.

The checkpoint has these tensors without values, on torch's device "meta", and names the folder and the checksums of the
files. It is written last, so it never names an incomplete file. ``torch.distributed.checkpoint`` is not used: it reads
the description of its files with pickle, which would execute the code of a forged one.
"""

from __future__ import annotations

import math
import shutil
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mtl.checks import InputError
from mtl.distributed import RowShards, gather
from mtl.files.run_files import checked_file
from mtl.files.writing import writing
from mtl.options import StrictModel

SHARDED = "sharded"  # storage_options of a checkpoint whose parts each process writes
PREFIX = "parts_"


class Parts(StrictModel):
    """What a checkpoint says of its parts: their folder, beside it, and their checksums in order of rank."""

    folder: Annotated[str, Field(pattern=rf"^{PREFIX}\d+$")]
    checksums: list[str]


def write_shards(content: Mapping[str, Any], path: Path, rank: int) -> dict[str, Any]:
    """Write this process's rows of the divided tensors in ``content``, and return the rest, to be written to ``path``.

    Every process must call this.
    """
    leaves, tree = tree_flatten(dict(content))
    shards = []
    for number, leaf in enumerate(leaves):
        if hasattr(leaf, "full_tensor"):
            shards.append(leaf.detach().to_local().cpu())
            leaves[number] = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    free = next(number for number in count(1) if not path.with_name(f"{PREFIX}{number}").exists())
    folder = path.with_name(f"{PREFIX}{gather(free)[0]}")  # process 0 chooses
    with writing(folder / f"{rank}.ckpt") as file:
        torch.save(shards, file)
        checksum = checksum_of(file)
    rest: dict[str, Any] = tree_unflatten(leaves, tree)
    return rest | {"parts": {"folder": folder.name, "checksums": gather(checksum)}}


def read_shards(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the ``content`` of the checkpoint at ``path`` with its divided tensors as ``RowShards``, read when used.

    Raises ValueError if a file is missing, incomplete or another one. The values of a file are compared with their
    checksums when a process uses it: of N processes, each reads its own file, not N.
    """
    leaves, tree = tree_flatten(dict(content))
    parts = content.get("parts") or {"folder": "", "checksums": []}
    files: list[Any] = []
    paths: list[Path] = []

    @cache
    def check(rank: int) -> None:
        try:
            check_zip(paths[rank])
        except Exception:
            raise InputError(f"checkpoint {path}: its part {paths[rank]} is damaged; take another checkpoint") from None

    for rank, checksum in enumerate(parts["checksums"]):
        file = path.with_name(parts["folder"]) / f"{rank}.ckpt"
        intact = False
        with suppress(Exception):  # missing or damaged
            check_members(checked_file(file, path.parent, math.inf))
            intact = checksum_of(file) == checksum
        if not intact:
            raise ValueError(f"its part {parts['folder']}/{file.name} is missing or damaged")
        paths.append(file)
        files.append(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    empty = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_meta]
    for index, number in enumerate(empty):
        pieces = RowShards((file[index] for file in files), check)
        if not pieces or pieces.shape != leaves[number].shape:
            raise ValueError("its parts have other shapes")
        leaves[number] = pieces
    filled: dict[str, Any] = tree_unflatten(leaves, tree)
    return filled


def check_zip(path: Path) -> None:
    """Raise an error if a checkpoint is not an undamaged zip file, or has compressed members; read all of it."""
    check_members(path)
    with zipfile.ZipFile(path) as archive:
        if archive.testzip() is not None:
            raise ValueError("a checksum is wrong")


def check_members(path: Path) -> None:
    """Raise an error if a checkpoint is not a complete zip file, or has compressed members; read only their list.

    torch never compresses, so a compressed file could only be meant to fill the memory.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        if not stored or sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("its members are larger than the file: this is no checkpoint but a zip bomb")


def checksum_of(file: Any) -> str:
    """Return the checksums (CRC-32) of the members of a zip file as one text."""
    with zipfile.ZipFile(file) as archive:
        return "".join(f"{member.CRC:08x}" for member in archive.infolist())


def joined(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``content`` with ordinary tensors in place of ``RowShards``."""
    whole = tree_map(lambda leaf: leaf.joined() if isinstance(leaf, RowShards) else leaf, dict(content))
    return {key: value for key, value in whole.items() if key != "parts"}


def delete_unused_shards(folder: Path) -> None:
    """Delete the parts in ``folder`` that no checkpoint there names."""
    named = set()
    for file in folder.glob("*.ckpt"):
        with suppress(Exception):  # a damaged file needs none
            checked_file(file, folder, math.inf)
            named.add(torch.load(file, map_location="cpu", weights_only=True, mmap=True)["parts"]["folder"])
    for parts in folder.glob(f"{PREFIX}*"):
        if parts.name.removeprefix(PREFIX).isdecimal() and parts.name not in named:
            shutil.rmtree(parts, ignore_errors=True)
