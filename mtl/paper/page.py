"""Write the report on a table or figure of a publication: our numbers beside the published ones, and the verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console

from mtl.checks import require
from mtl.files.tables import console_table
from mtl.files.writing import write_bytes, write_text
from mtl.paper.definition import Paper, Part, name_of
from mtl.paper.figures import figure_of
from mtl.paper.joint import joint_runs, section_of_joint
from mtl.paper.verdicts import RULES, Judgement, Pairs, Verdict, judge, judge_search
from mtl.report.compare import compare
from mtl.report.grid import Published, listing
from mtl.report.page import Section, pictures_beside, render, render_markdown
from mtl.report.runs import FINISHED, UNFINISHED, Runs, metric_of, read_named_runs
from mtl.report.section import PUBLISHED, section_of
from mtl.report.statistics import DELTA, SEEDS
from mtl.report.tables import in_markdown, written
from mtl.report.trials import Trials, best_trials, section_of_trials
from mtl.training.metrics import higher_is_better
from mtl.tune.launch import run_folder

FLOPS, BINARY = "test flops_selected", "test binary_selectors"  # columns of the table of runs
# Columns of the runs in a page's CSV
KEPT = (
    *("group", "setting", "state", *SEEDS, "overlap", FLOPS, PUBLISHED, BINARY),
    *("training flops_selected", "parameters", "epochs", "test experts_per_sample", "seconds_per_epoch"),
)
_TABLE = re.compile(r"^\|(?:.*\n)*?(?=### |!\[|\Z)", re.MULTILINE)  # a table and the sentences below it
# By group and gate: the words that a search chose, and the trial
Chosen = Mapping[tuple[str, str], tuple[list[str], int]]


def write(
    paper: Paper,
    chosen: Chosen,
    searches: Mapping[str, Trials],
    folder: Path,
    page: Path | None = None,
    changed: Sequence[str] = (),
) -> None:
    """Write ``report.html``, ``report.md`` and ``runs.csv`` into ``folder``, and print the verdicts.

    ``chosen``: the words chosen by the search for each row of the tables. ``searches``: the trials of each group that
    has any. ``page``: a Markdown file, or a folder for NAME.md; its pictures and a CSV file of the runs that have
    ended stand beside it. ``changed``: words of the command line that replace options of the file; the report begins
    with them.
    """
    if best := paper.scale.best:
        groups = {key: best_trials(trials, best)[0] for key, trials in searches.items()}
    else:
        groups = {group.key: runs for group in paper.groups if (runs := runs_of(paper, group, chosen, folder))}
    joints = joints_of(paper, groups)
    judgements = judged(paper, groups | joints, searches)
    sections = [claims_of(judgements, paper.file.remarks)]
    for key, runs in joints.items():
        sections.append(section_of_joint(paper.file.tables[key], runs, paper.gates, paper.published().get(key, {})))
    for group in paper.groups:
        if group.key in groups:
            sections.append(section(paper, group, groups[group.key], chosen, searches.get(group.key)))
        if group.key in searches and not best:
            sections.append(section_of_trials(searches[group.key], f"{group.name}: search"))
    figures = [drawn for figure in paper.file.figures if (drawn := figure_of(paper, figure, groups))]
    sections += [Section("Figures", figures=figures)] if figures else []
    title = f"{paper.file.title}: {paper.file.source}"
    intro = f"These are not the runs of the file: the command line has {' '.join(changed)}.\n\n" if changed else ""
    intro += f"Scale {paper.file.scale}: {paper.scale.note}.\n\n"
    intro += "Published numbers are marked; all others are means over our runs."
    table = runs_table(groups, folder)
    files = {
        folder / "report.html": render(title, intro, sections),
        folder / "report.md": render_markdown(title, intro, sections),
        folder / "runs.csv": table.write_csv(),
    }
    if page:
        claimed = [column for claim in paper.file.claims for column in (claim.column, claim.other)]
        own = [name for name in dict.fromkeys((*KEPT, *paper.file.columns, *claimed)) if name in table.columns]
        ended = table.filter(pl.col("state") != UNFINISHED) if own else table
        page = page if page.suffix == ".md" else page / f"{paper.name}.md"
        files[page] = render_markdown(title, intro, sections, page.stem).replace(f"{folder.absolute()}/", "")
        files[page.with_suffix(".csv")] = ended.select(own).write_csv()
        for name, picture in pictures_beside(page.stem, sections).items():
            write_bytes(page.with_name(name), picture.png)
    for path, text in files.items():
        write_text(path, text)
    show(judgements, folder / "report.html")


def judge_again(paper: Paper, page: Path) -> None:
    """Write the verdicts and tables of ``page``, made by ``write``, anew, as the runs in the CSV file beside it tell.

    What rests on numbers that the CSV does not have stays, such as a claim on a search, costs, and pictures. Raises
    InputError.
    """
    file = page.with_suffix(".csv")
    require(page.is_file() and file.is_file(), f"judge={page}: give the page of a report, with its CSV beside it")
    text = page.read_text()
    before, start, claims = text.partition("## Claims\n")
    claims, end, rest = claims.partition("\n## ")
    table = pl.read_csv(file, infer_schema_length=None)
    table = table if "state" in table.columns else table.with_columns(state=pl.lit(FINISHED))
    parts = table.partition_by("group", as_dict=True).items()
    directions = {name: higher_is_better(name) for name in map(metric_of, table.columns)} | {DELTA: True}
    higher = {name: direction for name, direction in directions.items() if direction is not None}
    measured = [name for name in table.columns if name not in KEPT]
    tables = {  # without the columns that only other groups have
        str(key): rows.drop(name for name in measured if rows[name].null_count() == len(rows)) for (key,), rows in parts
    }
    groups = {key: Runs(rows, "gate", {}, higher) for key, rows in tables.items()}
    cells = [line.strip("| ").split(" | ") for line in claims.splitlines() if line.startswith("|")]
    kept = {row[0]: row[1:] for row in cells if len(row) == 3 and row[1] in list(Verdict)}
    judgements = judged(paper, groups | joints_of(paper, groups), {})
    for index, each in enumerate(judgements):
        claim = each.claim
        unknown = claim.times or claim.column not in table.columns or (claim.other or "seed") not in table.columns
        if unknown and claim.text in kept:
            verdict, reason = kept[claim.text]
            judgements[index] = Judgement(claim, Verdict(verdict), reason)
    section = render_markdown("", "", [claims_of(judgements, paper.file.remarks)]).partition(start)[2]
    parts_of_page = f"{before}{start}{section}{end}{rest}".split("\n## ")
    for index, part in enumerate(parts_of_page):
        for group in paper.groups:
            if part.startswith(f"{group.name}\n") and group.key in groups and not paper.scale.best:
                runs = groups[group.key]
                listing = written(compare(runs, columns=columns_of(paper, runs)), published_of(paper, group, runs))
                for old in _TABLE.findall(part)[:1]:  # the other tables are of costs and searches
                    parts_of_page[index] = part.replace(old, f"{in_markdown(listing)}\n\n", 1).rstrip("\n") + "\n"
    write_text(page, "\n## ".join(parts_of_page))
    show(judgements, page)


def joints_of(paper: Paper, groups: Mapping[str, Runs]) -> dict[str, Runs]:
    """Return the runs of the joint tables that have any."""
    tables = {key: joint_runs(joint, groups, paper.gates) for key, joint in paper.file.tables.items()}
    return {key: runs for key, runs in tables.items() if runs}


def judged(paper: Paper, groups: Mapping[str, Runs], searches: Mapping[str, Trials]) -> list[Judgement]:
    """Return the judgement of each claim, also of those on groups and gates that have no runs."""
    found = []
    for claim in paper.file.claims:
        names = {key: name_of(key, paper.file.gates[key]) for key in (claim.gate, *claim.than)}
        if claim.times:
            trials = searches.get(claim.group)
            pairs = {key: pairs_of(trials, name, claim.column) for key, name in names.items()} if trials else {}
            found.append(judge_search(claim, pairs, names, claim.higher))
            continue
        runs = groups.get(claim.group)
        own = {key: runs.values(name, claim.column) for key, name in names.items()} if runs else {}
        if runs and claim.other:
            own[claim.other] = runs.values(names[claim.gate], claim.other)
        shares = {key: list(runs.values(name, BINARY).values()) for key, name in names.items()} if runs else {}
        found.append(judge(claim, own, names, shares, runs.overlap if runs else 0.0))
    return found


def runs_table(groups: Mapping[str, Runs], folder: Path) -> pl.DataFrame:
    """Return the runs of all groups, with their paths below ``folder``."""
    tables = [
        runs.table.select(pl.lit(key).alias("group"), pl.col("run").str.strip_prefix(f"{folder}/"), pl.exclude("run"))
        for key, runs in groups.items()
    ]
    return pl.concat(tables, how="diagonal_relaxed") if tables else pl.DataFrame()


def runs_of(paper: Paper, group: Part, chosen: Chosen, folder: Path) -> Runs | None:
    """Return the runs of a group that have begun; None if none has."""
    named: dict[Path, tuple[str, int | None]] = {}
    for gate in paper.gates_of(group):
        label = paper.definition(group, gate, *chosen[group.key, gate.key]).label
        own = {run_folder(folder, label, n): (gate.name, paper.file.seed + n) for n in range(paper.scale.seeds or 0)}
        named |= {path: name for path, name in own.items() if path.exists()}
    return read_named_runs(named, "gate") if named else None


def pairs_of(trials: Trials, gate: str, column: str) -> Pairs:
    """Return the validation value and the value of ``column`` of each finished trial of a gate."""
    table = trials.runs.table.filter(setting=gate, state=FINISHED)
    return table.select(trials.validation, column).rows() if column in table.columns else []


def section(paper: Paper, group: Part, runs: Runs, chosen: Chosen, trials: Trials | None) -> Section:
    """Return the section on one table; ``trials``: of its search, if any."""
    published = published_of(paper, group, runs)
    lines = [
        f"{gate.name}: {' '.join(words)} (trial {number} of the search)"
        for gate in paper.gates_of(group)
        for words, number in [chosen[group.key, gate.key]]
        if words
    ]
    measured = [gate for gate in paper.gates if any(runs.values(gate.name, FLOPS).values())]
    baseline = next((gate.name for gate in measured if gate.key == paper.file.baseline), None)
    names = {gate.key: gate.name for gate in paper.gates}
    pictures = {stem: [names[key] for key in keys if key in names] for stem, keys in paper.file.pictures.items()}
    shown: dict[str, Any] = {"columns": columns_of(paper, runs), "published": published, "baseline": baseline}
    shown |= {"curves": paper.file.curves, "pictures": pictures}
    if paper.scale.best and trials:
        return section_of_trials(trials, group.name, best=paper.scale.best, **shown)
    found = section_of(runs, group.name, **shown)
    planned, done = len(paper.gates_of(group)) * (paper.scale.seeds or 0), runs.table["state"].to_list().count(FINISHED)
    if done < planned:
        lines.append(f"{done} of {planned} runs have been done so far.")
    return replace(found, notes=[*found.notes, *lines])


def columns_of(paper: Paper, runs: Runs) -> list[str]:
    """Return the columns of the paper's tables that ``runs`` have."""
    return [column for column in paper.file.columns if column in runs.table.columns]


def published_of(paper: Paper, group: Part, runs: Runs) -> Published:
    """Return the published numbers of the gates of a group that have runs, by their names."""
    theirs = paper.published().get(group.key, {})
    begun = [gate for gate in paper.gates if gate.key in theirs and gate.name in runs.table["setting"]]
    return {gate.name: theirs[gate.key] for gate in begun}


def claims_of(judgements: Iterable[Judgement], remarks: Sequence[str]) -> Section:
    """Return the section on the claims of the publication, with ``remarks`` below the verdicts."""
    rows = [[each.claim.text, str(each.verdict), each.reason] for each in judgements]
    if not rows:
        return Section("Claims", "The file states none.", notes=remarks)
    verdicts = listing("Verdicts", ["claim", "verdict", "our runs"], rows, remarks)
    return Section("Claims", RULES, listings=[verdicts])


def show(judgements: Iterable[Judgement], report: Path) -> None:
    """Print the verdicts, and where the report is."""
    console = Console(highlight=False)
    rows = [[each.claim.text, str(each.verdict), each.reason] for each in judgements]
    if rows:
        console.print(console_table(["claim", "verdict", "our runs"], rows))
    console.print(str(report), soft_wrap=True, markup=False)
