"""Explain in one sentence why Hydra could not compose the configuration, and suggest the nearest option or choice.

Imports nothing slow, so that a mistyped option is answered at once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from glob import escape
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtl.checks import InputError, causes, format_value, suggestion
from mtl.config.compose import opened
from mtl.files.run_files import flatten
from mtl.overrides import key_of

OF_HYDRA = ("Config group override must be", "integer string conversion")  # errors that Hydra raises as a ValueError


def explain(error: BaseException, overrides: Sequence[str], others: Sequence[str] = ()) -> str | None:
    """Return a plain sentence for an error of Hydra or OmegaConf, or None for another error.

    ``overrides``: the overrides on the command line, such as ``gate=topk``. The nearest options are looked up by
    composing the configuration that the config groups among ``overrides`` choose. ``others``: further options, of a
    command that starts runs.
    """
    text = next((str(cause) for cause in causes(error) if str(cause)), "")
    if isinstance(error, OverrideParseException):
        return (
            f"{format_value(error.override)}: must be OPTION=VALUE, such as gate=comet; close every bracket and quote, "
            "and put text with special characters in two pairs of quotes, as in \"run_name='a, b'\""
        )
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        name = f"{group}={format_value(choice)}"
        if file := next(Path().glob(f"*/{escape(str(error.missing_cfg_file))}.yaml"), None):  # the user's own
            return f"{name}: to use {file}, add --config-dir {shlex.quote(file.parts[0])}"
        near = suggestion(choice, error.options, f"{group}=") or ";"
        return f"{name}: no such {group}{near} there are {', '.join(error.options)}"
    if match := re.search(r"(?:Could not (?:override|delete)(?: from config\.)?|Key) '([^'\n=]+)", text):
        key = match[1]
        override = next((override for override in overrides if key_of(override) == key), key)
        return f"{format_value(override)}: no such option{_nearest(key, overrides, others)}"
    if match := re.search(r"Error merging override (.*)", text):  # a section got a single value
        return f"{format_value(match[1])}: has options of its own; set them, as in {key_of(match[1])}.NAME=VALUE"
    if isinstance(error, HydraException | OmegaConfBaseException) or any(phrase in text for phrase in OF_HYDRA):
        sentence = " ".join(line.strip() for line in text.splitlines() if "object_type=" not in line)
        named = any(key_of(override) in sentence for override in overrides)
        return sentence if named or not overrides else f"{', '.join(map(format_value, overrides))}: {sentence}"
    return None


@contextmanager
def explained(overrides: Sequence[str], others: Sequence[str] = ()) -> Iterator[None]:
    """Raise InputError, see ``explain``, if an option or a choice among ``overrides`` does not exist."""
    try:
        yield
    except Exception as error:
        sentence = explain(error, overrides, others)
        if sentence is None:
            raise
        raise InputError(sentence) from error


def _nearest(key: str, overrides: Sequence[str], others: Sequence[str]) -> str:
    """Return "; did you mean OPTION?" with the option or group most like ``key``, "" if there is none."""
    running = GlobalHydra.instance().is_initialized()
    with nullcontext() if running else opened():
        groups = GlobalHydra.instance().config_loader().list_groups("")
        chosen = [override for override in overrides if key_of(override) in groups and "," not in override]
        try:
            cfg = compose("train", chosen)
        except HydraException:
            cfg = compose("train")
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    names = [*others, *flatten(raw), *groups]
    section, _, last = key.rpartition(".")
    beside = [name for name in names if section and name.rpartition(".")[0] == section]
    if near := suggestion(last, [name.rpartition(".")[2] for name in beside], f"{section}."):
        return near
    same = [name for name in names if name.rpartition(".")[2] == last]  # in another section: batch_size is in data
    if same:
        return suggestion(key, [min(same, key=len)], cutoff=0.0)
    return f"; there are {', '.join(beside)}" if beside else suggestion(key, names)
