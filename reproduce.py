"""Run a table or figure of a paper again: ``python reproduce.py dselect_k_static scale=laptop``.

Words that ``conf/reproduce.yaml`` lists are its own options, all others are options of train.py for all of the runs.
The same command, started again or on other machines, works on the same runs; at the end it writes the report and says
which claims of the paper hold. ``show=true`` writes the report of what there is. The tables are in ``conf/paper/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from mtl.cli.explain import CONF
from tune import command, first_run, split_words

OWN = [*OmegaConf.load(CONF / "reproduce.yaml"), "sampler", "pruner"]
OWN = [
    name
    for name in OWN
    if name not in ("defaults", "fixed", "groups", "gates", "space", "baseline", "published", "claims", "remarks")
]


def configuration(words: Sequence[str]) -> tuple[str, DictConfig, list[str], list[str]]:
    """Return the name of the table, the composed ``conf/reproduce.yaml``, and the words of train.py and of its own."""
    from mtl.checks import InputError

    known = sorted(path.stem for path in (CONF / "paper").glob("*.yaml"))
    names = [word for word in words if "=" not in word]
    if len(names) != 1 or names[0] not in known:
        given = f"{' '.join(names)}: " if names else ""
        raise InputError(f"{given}give one of {', '.join(known)}, as in reproduce.py {known[0]} scale=laptop")
    own, others = split_words([word for word in words if "=" in word], OWN)
    only = [word.partition("=")[2] for word in own if word.startswith("only=")]  # Hydra would read its comma as a sweep
    cfg = hydra.compose("reproduce", [f"paper={names[0]}", *(word for word in own if not word.startswith("only="))])
    cfg.only = only[-1] if only else None
    return names[0], cfg, others, own


def run(words: Sequence[str]) -> None:
    """Compose and check the runs of a table, do those that are missing, and write the report."""
    from mtl.checks import InputError

    try:
        from mtl.paper.command import reproduce
    except ModuleNotFoundError as error:
        raise InputError(f"reproduce.py needs the package {error.name}: pip install -e '.[tune]'") from None
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        name, cfg, others, own = configuration(words)
        reproduce(cfg, name, others, first_run, Path(__file__).with_name("train.py"), own)


def main() -> None:
    """Run the command."""
    command(run, f"{__doc__}\n{(CONF / 'reproduce.yaml').read_text()}")


if __name__ == "__main__":
    main()
