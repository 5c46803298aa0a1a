"""What a study is: fixed options, a space, a sampler and a pruner, read from ``conf/study`` and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtl.checks import InputError, check_name, check_number, check_whole, require
from mtl.records import flatten


@dataclass(frozen=True)
class Definition:
    """One study of Optuna: the trials of one gate.

    ``label``: the gate, or "" for a study without gates. ``words``: the options that all its trials share, as words of
    train.py's command line.
    """

    name: str
    label: str
    words: list[str]
    space: dict[str, Any]
    sampler: dict[str, Any]
    pruner: dict[str, Any]
    seed: int

    def record(self, monitor: str) -> dict[str, Any]:
        """Return what must not change as long as the study lives, as plain data; folders may differ by machine."""
        return {
            "words": {key_of(word): word for word in self.words if not word.startswith(("paths.", "hydra."))},
            "space": self.space,
            "sampler": self.sampler,
            "pruner": self.pruner,
            "seed": self.seed,
            "monitor": monitor,
        }


def read(cfg: DictConfig, name: str, gates: Sequence[str], words: Sequence[str]) -> list[Definition]:
    """Return the studies that ``cfg``, the composed ``conf/tune.yaml``, asks for.

    ``name``: of the study's file. ``gates``: those to search, [] for all of the file. ``words``: options of train.py,
    which replace those of the file. Raises InputError for a gate that the file lacks and for a wrong option.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    check_whole("n_trials", plain["n_trials"], at_least=1)
    check_workers(plain)
    title = plain["name"] or name
    check_name("name", title)
    require("/" not in title, f"name={title}: must not contain a slash")
    of_gates = plain["gates"] or {}
    missing = [gate for gate in gates if of_gates and gate not in of_gates]
    require(not missing, f"gate={','.join(missing)}: study {name} has the gates {', '.join(of_gates)}")
    if not of_gates:
        words = [*words, *(f"gate={gate}" for gate in gates)]
        require(len(gates) < 2, f"gate={','.join(gates)}: study {name} has no section gates; give one gate")
    found = []
    for gate in (list(gates) or list(of_gates)) if of_gates else [""]:
        own = of_gates.get(gate) or {}
        fixed = [*plain["fixed"], *own.get("fixed", [f"gate={gate}"] if gate else [])]
        space = plain["space"] | own.get("space", {})
        clash = [word for word in words if key_of(word) in space]
        require(not clash, f"{' '.join(clash)}: study {name} searches this option; leave it out")
        found.append(
            Definition(
                name=f"{title}/{gate}" if gate else title,
                label=gate,
                words=list({key_of(word): word for word in (*fixed, *words)}.values()),
                space=space,
                sampler=plain["sampler"],
                pruner=plain["pruner"],
                seed=plain["seed"],
            )
        )
    return found


def check_workers(plain: Mapping[str, Any]) -> None:
    """Raise InputError for a wrong option of workers, or a wrong seed."""
    check_whole("seed", plain["seed"], at_least=0)
    check_whole("retries", plain["retries"], at_least=0)
    check_whole("max_failures", plain["max_failures"], at_least=1, or_null=True)
    check_number("heartbeat", plain["heartbeat"], above=0)


def require_same(name: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise InputError unless a study that exists was begun with the same definition."""
    if before == now:
        return
    old, new = flatten(before), flatten(now)
    changed = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    shown = "; ".join(f"{key} was {old.get(key, 'not given')}, is {new.get(key, 'not given')}" for key in changed)
    raise InputError(
        f"study {name} was begun with other options: {shown}. Its trials would not be comparable: take these changes "
        "back, or begin another study with name=NAME"
    )


def key_of(word: str) -> str:
    """Return the name of the option that a word of train.py's command line sets."""
    return word.lstrip("+~").partition("=")[0]
