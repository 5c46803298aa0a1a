"""Check the composed configuration before anything is built: types, ranges, choices, names.

What a class accepts follows from the annotations of its constructor (see ``mtl.kinds``), so a new gate, network or data
set needs no entry here. ``tables`` holds the options that belong to no class of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from mtl.checks import InputError
from mtl.config.schema import tables
from mtl.config.schema.annotations import find, options
from mtl.config.schema.tree import Node, Reader
from mtl.kinds import Choice, Described, Flag, Kind, ListOf, Null, OneOf, listed, shown, suggestion

MOST = 4  # problems that one message names
PROCESSES = 8  # on any machine; more on one with more cores
SPECIAL: dict[str, Kind] = {  # Hydra's own keys of a section with _target_
    "_partial_": Flag(),
    "_recursive_": Flag(),
    "_convert_": Choice(("none", "partial", "object", "all")),
    "_args_": ListOf(),
}
# Arguments that the program fills in, and that are no options where the section leaves them out
SUPPLIED = {"params", "spec", "inputs", "network", "num_tasks", "num_experts", "input_dim", "seed"}
ONE_OF_SEVERAL = OneOf((Described(), Null(), Choice((False,))))


def check(cfg: DictConfig, words: Sequence[str] = ()) -> None:
    """Raise InputError, one sentence for each of the first few problems, if a value of ``cfg`` cannot be right.

    ``words``: those of the command line; something has to read each option that one of them adds. Classes that
    ``_target_`` names are imported, nothing is built, and no file is read.
    """
    try:
        found: dict[str, str] = {}
        reader = Reader(cfg)
        for problem in (*_problems(reader), *_unread(reader, words)):
            key = problem.split("=")[0].split(": ")[0]
            whole = key in tables.OBJECTS and problem.startswith(f"{key}=")
            choose = f"; choose one with {key}=NAME" if whole else ""
            found.setdefault(key, problem + choose)  # one for each option
    except RecursionError:
        raise InputError("the configuration is nested too deeply, or refers to itself; use fewer of ${}") from None
    if found:
        more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
        raise InputError("; ".join([*list(found.values())[:MOST], *more]))


def _problems(reader: Reader) -> Iterator[str]:
    root = reader.tree().value
    mentioned = {".".join(name.split(".")[:2]) for name in reader.references()}
    roots = {name.split(".")[0] for name in mentioned}
    for name, node in root.items():
        if name in tables.TOP:
            yield from tables.TOP[name].problems(node.key, node.plain())
        elif name in tables.OBJECTS:
            yield from _section(name, node, tables.OBJECTS[name])
        elif name == "recipe":
            yield from _setting(node, mentioned)
        elif name in tables.SEVERAL:
            yield from _several(name, node)
        elif name != "hydra" and name not in roots:
            near = suggestion(name, [*tables.TOP, *tables.OBJECTS, *tables.SEVERAL, "recipe"])
            meant = reader.elsewhere(name) or near or ", and nothing refers to it"
            yield f"{name}: there is no such section or option{meant}"
    for name in ("data", "network", "optimizer", "trainer", "callbacks"):
        if name not in root:
            yield f"{name}: this section is missing; choose one with {name}=NAME"
    if isinstance(root.get("trainer"), Node):
        yield from _too_many_devices(root["trainer"])


def _setting(node: Node, mentioned: set[str]) -> Iterator[str]:
    if not isinstance(node.value, dict):
        yield f"recipe={shown(node.plain())}: must be a section with {listed(tables.RECIPE)}"
        return
    for name, child in node.value.items():
        kind = tables.RECIPE.get(name)
        if kind is not None:
            yield from kind.problems(child.key, child.plain())
        elif child.key not in mentioned and (near := suggestion(name, tables.RECIPE, "recipe.", 0.8)):
            yield f"{child.key}: nothing refers to it{near}"


def _unread(reader: Reader, words: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each option that a word such as ``+recipe.more=1`` adds and that nothing would read.

    Objects say themselves which options they have, and null leaves something out.
    """
    for word in words:
        key, names = word.lstrip("+").partition("=")[0], word.lstrip("+").partition("=")[0].split(".")
        values = [reader.value(names[:length]) for length in range(1, len(names) + 1)]
        read = any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in reader.references())
        is_object = any(isinstance(value, dict) and "_target_" in value for value in values)
        if word.startswith("+") and len(names) > 1 and values[-1] is not None and not read and not is_object:
            near = reader.elsewhere(names[-1], but=key)
            yield f"{key}: nothing reads this option{near or '; leave it out'}"


def _several(section: str, node: Node) -> Iterator[str]:
    """Yield the problems of a section of callbacks or loggers; there may be no logger."""
    if section == "logger" and (node.value is None or node.value is False):
        return
    if not isinstance(node.value, dict):
        yield f"{section}={shown(node.plain())}: must be a section of sections; {section}.NAME=null leaves out one"
        return
    for name, child in node.value.items():
        # Values without a class, such as a recipe's for a schedule that was not chosen, mean nothing
        if not isinstance(child.value, dict) or "_target_" in child.value:
            yield from _section(f"{section}.{name}", child, ONE_OF_SEVERAL)


def _section(name: str, node: Node, kind: Kind) -> Iterator[str]:
    """Yield the problems of a section that describes an object, and of all objects inside."""
    wrong = list(kind.problems(node.key, node.plain()))
    yield from wrong
    if wrong or not isinstance(node.value, dict):
        return
    partial = node.value.get("_partial_")
    is_partial = partial is not None and partial.value is True
    built = name.partition(".")[0] in tables.BUILT
    if is_partial and built:
        yield f"{node.key}._partial_=true: must be false, since this section is built as it stands"
    inside = list(_inside(node))
    yield from inside
    if inside:
        return
    target = find(node.value["_target_"].value, f"{node.key}._target_")
    is_module = isinstance(target, type) and issubclass(target, nn.Module | torch.optim.Optimizer)
    if name in tables.FACTORIES and is_module and not is_partial:
        yield f"{node.key}._partial_={'false' if partial else 'null'}: must be true; its sizes are filled in later"
    if built:
        missing = sorted(options(target).required - node.value.keys())
        if missing and "_args_" not in node.value:
            yield f"{node.key}: {target.__name__} needs {', '.join(missing)}; give {node.key}.{missing[0]}=..."


def _inside(node: Node) -> Iterator[str]:
    """Yield the problems of all objects that ``node`` describes, itself or below."""
    if isinstance(node.value, dict) and "_target_" in node.value:
        yield from _object(node)
    for child in node.children():
        yield from _inside(child)


def _object(section: Node) -> Iterator[str]:
    """Yield the problems of one section with ``_target_``: of its class, and of the options that it gives."""
    named = section.value["_target_"]
    path = named.plain()
    wrong = list(tables.NAME.problems(named.key, path))
    if not wrong:
        try:
            target = find(path, named.key)
        except InputError as error:
            wrong = [str(error)]
    yield from wrong
    if wrong:
        return
    known = options(target)
    for name, child in section.value.items():
        kind = SPECIAL.get(name) if name.startswith("_") else known.kinds.get(name)
        if kind is not None:
            yield from kind.problems(child.key, child.plain())
        elif known.closed and name not in known.kinds and not name.startswith("_"):
            yield _unknown_option(section, target, name)


def _unknown_option(section: Node, target: Any, name: str) -> str:
    """Return the sentence that ``target``, which ``section`` describes, has no option ``name``."""
    names = [other for other in options(target).kinds if other in section.value or other not in SUPPLIED]
    near = suggestion(name, names)
    title = getattr(target, "__name__", str(target))
    return f"{section.key}.{name}: {title} has no option {name}{f'{near} It' if near else '; it'} has {listed(names)}"


def _too_many_devices(trainer: Node) -> Iterator[str]:
    """Yield a sentence if one machine is asked for more devices than it has, or for more processes than make sense."""
    section = trainer.plain()
    if not isinstance(section, dict):
        return
    devices, accelerator = section.get("devices", "auto"), section.get("accelerator", "auto")
    if not tables.Devices().accepts(devices):
        return  # said already
    if isinstance(devices, list):
        asked = len(devices)
    else:
        asked = devices if isinstance(devices, int) else int(devices) if devices.isdecimal() else 0
    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    if accelerator in ("gpu", "cuda") or (accelerator == "auto" and gpus):
        if torch.backends.mps.is_available():
            return
        if gpus == 0:
            yield f"trainer.accelerator={accelerator}: this machine has no GPU; use trainer.accelerator=cpu"
        elif asked > gpus:
            yield f"trainer.devices={shown(devices)}: this machine has {gpus} GPUs; give at most {gpus}"
    elif accelerator in ("cpu", "auto") and asked > max(PROCESSES, cores):
        most = max(PROCESSES, cores)
        yield (
            f"trainer.devices={shown(devices)}: so many processes on the {cores} CPU cores of this machine would only "
            f"slow each other down; give at most {most}"
        )
