"""Explain in one sentence why Hydra could not compose the configuration, and suggest the nearest option or choice.

Imports nothing slow, so that a mistyped option is answered at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtl.checks import first_line

CONF = Path(str(files("mtl.conf")))
LONGEST = 80  # characters of a word that a sentence repeats
PREFIX = "+~"


def explain(error: BaseException, words: Sequence[str]) -> str | None:
    """Return a plain sentence for an error of Hydra or OmegaConf, or None for an unknown error.

    ``words``: the overrides on the command line, such as ``gate=topk``. The nearest options are looked up by composing
    the configuration that the config groups among ``words`` choose. Never raises.
    """
    try:
        return _explain(error, [str(word) for word in words])
    except Exception:  # the error itself will be shown
        return None


def _explain(error: BaseException, words: list[str]) -> str | None:
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if isinstance(error, MissingConfigException):
        return _missing_file(error, words)
    text = str(error)
    if isinstance(error, ValueError) and "integer string conversion" in text:  # from Python, while Hydra reads a word
        return f"{_cut(max(words, key=len, default='a number'))}: has more digits than any option takes"
    if isinstance(error, HydraException | OmegaConfBaseException):
        if match := re.search(r"Could not (override|delete)(?: from config\.)? '([^'\n=]+)", text):
            return _no_such_option(match[2], words, "~" if match[1] == "delete" else "")
        if match := re.search(r"Override (\S+) looks like a config group override", text):
            return _no_such_option(match[1].partition("=")[0], words)
        for pattern, answer in SENTENCES.items():
            if match := re.search(pattern, text):
                return answer.format(_cut(match[1]))
    if isinstance(error, ValueError) and "Config group override must be" in text:
        return _no_choice(words)
    if isinstance(error, ConfigCompositionException | OmegaConfBaseException):
        first = first_line(error if str(error) else error.__cause__ or error)
        key = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
        sentence = f"{key}: {first}" if key and first and not first.startswith(str(key)) else first or None
        referring = [_cut(word) for word in words if "${" in word or "???" in word]
        return f"{', '.join(referring)}: {sentence}" if referring else sentence
    return None


def _no_choice(words: list[str]) -> str | None:
    """Return the sentence for a config group that is set to a number, a boolean or a dict instead of a choice."""
    groups = _groups()
    for word in words:
        key, _, value = word.lstrip(PREFIX).partition("=")
        if not key:
            return f"{_cut(word)}: the part before = must be the name of an option, such as gate.k"
        if key in groups and not word.startswith("~") and value not in (choices := _choices(key)):
            several = "; several are logger=[csv,tensorboard]" if key == "logger" else ""
            return f"{_cut(word)}: must name one of {', '.join(choices)}{several}"
    return None


def _unreadable(word: str) -> str:
    name, equals, _ = word.partition("=")
    if not equals:
        word = _cut(word) or "an empty word"
        return f"{word}: must be OPTION=VALUE, such as gate=comet; python train.py --help lists the options"
    if not re.fullmatch(r"[+~]{0,2}[\w.@/$:-]+", name):
        return f"{_cut(word)}: the part before = must be the name of an option, such as gate.k"
    return (
        f"{_cut(word)}: the value cannot be read; put text with special characters in two pairs of quotes, as in "
        f"\"{_cut(name)}='...'\", and close every bracket, brace and quote"
    )


def _missing_file(error: MissingConfigException, words: list[str]) -> str:
    group, _, choice = str(error.missing_cfg_file or "").rpartition("/")
    if not group:
        return f"there is no configuration {error.missing_cfg_file}: {first_line(error)}"
    word = next((word for word in words if _key(word).split("@")[0] == group), "")
    options = list(error.options or _choices(group))
    where = f"{_cut(word)}: " if word else f"{first_line(error)}: "
    choice = choice or "without a name"
    near = _nearest(choice, options)
    meant = f"; did you mean {group}={near}? There are" if near else "; there are"
    return f"{where}there is no {group} {_cut(choice)}{meant} {', '.join(options)}"


def _no_such_option(key: str, words: list[str], sign: str = "") -> str:
    """Return the sentence for an option or a group that does not exist; ``sign``: "~" if it was to be removed."""
    word = next((word for word in words if _key(word) == key), key)
    if "@" in key:
        return f"{_cut(word)}: nothing is placed there; a choice is written {key.partition('@')[0]}=NAME, without @"
    if key in _groups():
        return f"{_cut(word)}: the configuration chosen by the other options has no {key}; leave this option out"
    if "/" in key:
        near = _nearest(key, _groups())
        return f"{_cut(word)}: there is no group {_cut(key)}{f'; did you mean {near}?' if near else ''}"
    near, equals, value = _nearest_option(key, words), *word.partition("=")[1:]
    meant = f"; did you mean {sign}{near}{equals}{_cut(value)}?" if near else ""
    adding = "" if sign else f" (+{_cut(word)} adds a new option)"
    return f"{_cut(word)}: no such option{meant}{adding}"


SENTENCES = {  # a pattern in Hydra's message: what we say instead
    r"Additional config directory '([^'\n]+)' not found": "--config-dir {0}: there is no such folder",
    r"(?:Ambiguous value for argument|Sweep parameters) '(.+)'": (
        "{0}: several values need -m, which runs one after the other; put a list in brackets, and text with a comma in "
        "two pairs of quotes"
    ),
    r"Error merging override (.+)": (
        "{0}: the value cannot be read here; a section takes {{name: value}}, an option one value, and a reference is "
        "written ${{section.option}}"
    ),
}


def _nearest_option(key: str, words: list[str]) -> str:
    """Return the existing option, section or group that is most like ``key``, "" if none is."""
    options = [*_options(words), *_groups()]
    section = key.rpartition(".")[0]
    beside = [name for name in options if name.rpartition(".")[0] == section]
    near = _nearest(key, beside) or _nearest(key, options, 0.75)
    if near:
        return near
    last = key.rpartition(".")[2]  # the right name in the wrong section: batch_size is data.batch_size
    same = [name for name in options if name.rpartition(".")[2] == last]
    return min(same, key=len, default="")


def _nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the most similar of ``names``; names of the same section come first, compared by their last parts."""
    lower = {other.lower(): other for other in names}
    section = name.rpartition(".")[0].lower()
    if section:
        ends = {key.rpartition(".")[2]: other for key, other in lower.items() if key.rpartition(".")[0] == section}
        near = difflib.get_close_matches(name.rpartition(".")[2].lower(), ends, 1, cutoff)
        if near:
            return ends[near[0]]
    near = difflib.get_close_matches(name.lower(), lower, 1, cutoff)
    return lower[near[0]] if near else ""


def _options(words: list[str]) -> list[str]:
    """Return the dotted names of all options in the configuration that the config groups among ``words`` choose."""
    groups = set(_groups())
    chosen = [word for word in words if _key(word).split("@")[0] in groups and "," not in word]
    for kept in (chosen, []):
        try:
            with _hydra():
                cfg = compose("train", kept)
        except HydraException:
            continue
        raw: Any = OmegaConf.to_container(cfg, resolve=False)
        return list(_names(raw, raw))
    return []


@contextmanager
def _hydra() -> Iterator[Any]:
    """Yield Hydra's config loader: that of the running program, or else a new one for the installed ``conf/``."""
    if GlobalHydra.instance().is_initialized():
        yield GlobalHydra.instance().config_loader()
    else:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield GlobalHydra.instance().config_loader()


def _names(node: Any, sections: dict[str, Any], prefix: str = "", depth: int = 0) -> Iterator[str]:
    if isinstance(node, str) and (match := re.fullmatch(r"\$\{(\w+)\}", node)):
        node = sections.get(match[1])
    if not isinstance(node, dict) or depth > 8:
        return
    for name, child in node.items():
        if not str(name).startswith("_"):
            yield f"{prefix}{name}"
            yield from _names(child, sections, f"{prefix}{name}.", depth + 1)


def _groups() -> list[str]:
    """Return the names of the config groups, such as gate and network/gate_trunk."""
    with _hydra() as loader:
        return list(_groups_below("", loader))


def _groups_below(parent: str, loader: Any) -> Iterator[str]:
    for name in loader.list_groups(parent):
        group = f"{parent}/{name}" if parent else name
        if group != "hydra":
            yield group
            yield from _groups_below(group, loader)


def _choices(group: str) -> list[str]:
    with _hydra() as loader:
        return list(loader.get_group_options(group, ObjectType.CONFIG))


def _key(word: str) -> str:
    return word.lstrip(PREFIX).partition("=")[0]


def _cut(text: str) -> str:
    """Return ``text`` in printable characters, cut to a readable length."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
