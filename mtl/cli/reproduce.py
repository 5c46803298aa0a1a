"""Run a table or figure of a paper again: ``mtl reproduce dselect_k_static scale=laptop``.

Words that ``conf/reproduce.yaml`` lists are its own options, all others are options of every run. The same command,
started again or on other machines, works on the same runs; at the end it writes the report and says which claims of the
paper hold. ``show=true`` writes the report of what there is. The tables are in ``conf/paper/``;
``mtl reproduce`` alone lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import hydra
from omegaconf import DictConfig

from mtl.checks import InputError, suggestion
from mtl.cli.help import described
from mtl.cli.study import check_names, start
from mtl.config.compose import CONF, own_options, split_overrides
from mtl.jobs.process import prepare
from mtl.overrides import key_of
from mtl.paper.definition import SMOKE, read

SECTIONS = ("fixed", "groups", "methods", "space", "values", "baseline", "published", "claims", "remarks", "tables")
OWN = [*own_options("reproduce.yaml", *SECTIONS), "sampler", "pruner"]


def configuration(overrides: Sequence[str]) -> tuple[str, DictConfig, list[str], list[str]]:
    """Return the name of the table, the composed ``conf/reproduce.yaml``, the overrides of the runs, and its own."""
    tables = sorted(path.stem for path in (CONF / "paper").glob("*.yaml"))
    names = [override for override in overrides if "=" not in override]
    if len(names) != 1 or names[0] not in tables:
        near = suggestion(names[0], tables).removeprefix("; ") if names else ""
        prefix = f"{' '.join(names)}: {f'{near} Else ' if near else ''}" if names else ""
        raise InputError(f"{prefix}give one of {', '.join(tables)}, as in {tables[0]} scale=laptop")
    command_overrides, others = split_overrides([override for override in overrides if "=" in override], OWN)
    only = [
        override.partition("=")[2] for override in command_overrides if key_of(override) == "only"
    ]  # Hydra would read its comma as a sweep
    cfg = hydra.compose(
        "reproduce", [f"paper={names[0]}", *(override for override in command_overrides if key_of(override) != "only")]
    )
    cfg.only = only[-1] if only else None
    return names[0], cfg, others, command_overrides


def listed() -> Iterator[str]:
    """Yield lines with the name of each table, the purpose that its file opens with, its numbers of runs and hours."""
    yield from ("Tables and figures, as in mtl reproduce dselect_k_static scale=laptop:", "")
    for path in sorted((CONF / "paper").glob("*.yaml")):
        purpose = path.read_text().splitlines()[1].removeprefix("# ").partition(" Example: ")[0]
        cfg, costs = configuration([path.stem])[1], list[tuple[int, str]]()
        for scale in (SMOKE, *cfg.scales):
            cfg.scale = scale
            paper = read(cfg, path.stem, [])
            hours = f" ({paper.scale.hours:g} h)" if paper.scale.hours else ""
            costs.append((paper.count, f"{scale} {paper.count:,}{hours}"))
        cost = ", ".join(text for _, text in sorted(costs))
        yield from described(path.stem, f"{purpose} Runs: {cost}.")
    yield from ("", f"scale={SMOKE}: three batches of some rows, with each group and each method.")
    yield "Hours (h): at most, as measured on two CPU cores. Runs end with the time left."


def run(overrides: Sequence[str]) -> None:
    """Do the missing runs of a table, once all are checked, and write the report. Without arguments, list them."""
    if not overrides:
        for line in listed():
            print(line, flush=True)
        return
    name, cfg, others, command_overrides = configuration(overrides)
    if not cfg.judge:
        paper = read(cfg, name, others)
        for row in paper.rows()[:1]:
            check_names(paper.setting(row).overrides, OWN)
        if not cfg.show:
            prepare()
    from mtl.paper.command import reproduce  # imports slow packages, which the list does without

    reproduce(cfg, name, others, command_overrides)


main = partial(start, "reproduce.yaml", __doc__ or "", run)
