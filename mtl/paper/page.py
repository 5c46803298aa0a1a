"""Write the report on a table or figure of a publication: verdicts, and our numbers beside the published ones.

All but pictures and searches, which stay as they are, follows from the CSV file of the runs and the definition.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import polars as pl
from rich.console import Console

from mtl.checks import require
from mtl.files.escaping import plain
from mtl.files.tables import Bold, Table
from mtl.files.writing import write_bytes, write_text
from mtl.jobs.setting import run_folder
from mtl.paper.definition import Key, Paper, Part, name_of
from mtl.paper.figures import figure_of
from mtl.paper.joint import joint_runs, section_of_joint
from mtl.paper.verdicts import ClaimStatus, Judgement, TrialValues, judge, judge_search
from mtl.report.comparison import Published
from mtl.report.page import PAGE, Link, Page, Picture, Section, linked
from mtl.report.runs import FINISHED, TOTALS, UNFINISHED, Runs, read_named_runs
from mtl.report.section import COSTS, FLOPS, pictures_of, section_of
from mtl.report.statistics import SEEDS
from mtl.report.trials import BEST_TRIALS_FRACTION, Trials, best_trials, section_of_trials

BINARY = "test/binary_selectors"  # a column of the table of runs
CHOSEN, OVERRIDES = "chosen", "overrides"  # columns of the CSV: what a search chose; overrides that replace the file's
# Columns of the CSV besides those of the tables and claims; the numbers among them belong to the costs
CSV_COLUMNS = ("group", "setting", "run", "state", "reason", *SEEDS, "overlap", CHOSEN, OVERRIDES, BINARY, *COSTS)
RULES = "rules.md"  # beside the pages of benchmarks/accuracy
_DECISIVE = (ClaimStatus.CONTRADICTED, ClaimStatus.HOLDS, ClaimStatus.UNDECIDED)  # the order of the rows
HEADER = ("claim", "verdict", "gain in our runs, % [95 % interval]")
_PICTURE = re.compile(r"^!\[(.*)\]\(.*\)\n?", re.MULTILINE)
Chosen = Mapping[Key, tuple[list[str], int]]  # of each row, the overrides that a search chose, and the trial


# What a CSV does not have, by title: sections on searches, and the pictures of the others
Kept = Mapping[str, Section]


def write(
    paper: Paper,
    chosen: Chosen,
    searches: Mapping[str, Trials],
    folder: Path,
    page: Path | None = None,
    changed: Sequence[str] = (),
) -> None:
    """Write the page into ``folder``, and print the verdicts.

    ``chosen``: the overrides chosen by the search for each row of the tables. ``searches``: the trials of each group
    that has any. ``page``: a Markdown file, or a folder for NAME.md; its pictures and a CSV file of the runs that have
    ended stand beside it. ``changed``: overrides of the command line that replace options of the file.
    """
    if best := paper.scale.best:
        groups = {key: best_trials(trials, best)[0] for key, trials in searches.items()}
    else:
        groups = {group.key: runs for group in paper.groups if (runs := runs_of(paper, group, chosen, folder))}
    names, kept = {method.key: method.name for method in paper.methods}, dict[str, Section]()
    pictures = {stem: [names[key] for key in keys if key in names] for stem, keys in paper.file.pictures.items()}
    for group in paper.groups:
        if runs := groups.get(group.key):
            kept[group.name] = Section(group.name, figures=pictures_of(runs, paper.file.curves, pictures)[0])
        if trials := searches.get(group.key):
            searched = section_of_trials(trials, f"{group.name}: search", best=best or BEST_TRIALS_FRACTION, curves={})
            tables = searched.tables[1 if best else 0 :]
            kept[searched.title] = replace(searched, comparison=None, costs=None, tables=tables)
    drawn = [drawn for figure in paper.file.figures if (drawn := figure_of(paper, figure, groups))]
    kept |= {"Figures": Section("Figures", figures=drawn)} if drawn else {}
    table = runs_table(paper, groups, {} if best else chosen, folder, changed)
    report = report_of(paper, table.write_csv(), kept, searches)
    replace(report.page(folder), runs=table).write(folder)
    if page:
        page = page if page.suffix == ".md" else page / f"{paper.name}.md"
        claimed = [column for claim in paper.file.claims for column in (claim.column, claim.other)]
        columns = dict.fromkeys((*CSV_COLUMNS, *paper.file.columns, *claimed))
        exported = [name for name in columns if name in table.columns]
        ended = table.filter(pl.col("state") != UNFINISHED).select(exported) if exported else table
        text = ended.select(column for column in ended if column.null_count() < len(ended)).write_csv()
        write_text(page.with_suffix(".csv"), text)
        for name, picture in _write_beside(report_of(paper, text, kept, searches), page).items():
            write_bytes(page.with_name(name), picture.png)
    show(report.judgements, folder / PAGE)


def _write_beside(report: Report, page: Path) -> dict[str, Picture]:
    """Write the page in Markdown, and return the pictures that it links by their file names beside it."""
    pictures = linked(report.sections, page.stem)
    write_text(page, report.page(page.parent).markdown(page.with_suffix(".csv").name, pictures))
    return pictures


def redraw_page(paper: Paper, page: Path) -> None:
    """Write ``page``, which ``write`` made, again from the runs in the CSV file beside it. Raises InputError."""
    file = page.with_suffix(".csv")
    require(page.is_file() and file.is_file(), f"judge={page}: give the page of a report, with its CSV beside it")
    kept, stored = dict[str, Section](), dict[str, Judgement]()
    for part in page.read_text().split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        figures = [Picture(plain(caption), b"") for caption in _PICTURE.findall(body)]
        kept[plain(title)] = Section(plain(title), figures=figures, stored=_PICTURE.sub("", body).strip("\n"))
        rows = [plain(line).strip("| ").split(" | ") for line in body.splitlines() if line.startswith("|")]
        verdicts = {row[0]: (row[1].strip("*"), row[2]) for row in rows if len(row) == 3}
        for claim in paper.file.claims:
            verdict, reason = verdicts.get(claim.text, ("", ""))
            if verdict in list(ClaimStatus):
                stored[claim.text] = Judgement(claim, ClaimStatus(verdict), reason)
    report = report_of(paper, file.read_text(), kept, {}, stored)
    _write_beside(report, page)
    show(report.judgements, page)


@dataclass(frozen=True)
class Report:
    """What the ``runs`` in the CSV of a page tell: a judgement of each claim, and the sections."""

    paper: Paper
    runs: pl.DataFrame
    judgements: Sequence[Judgement]
    sections: Sequence[Section]

    def page(self, folder: Path) -> Page:
        """Return the page for ``folder``, which may have the rules of verdicts."""
        key, scale = self.paper.name, self.paper.file.scale
        setup, verdicts = list[str](), [judgement.verdict for judgement in self.judgements]
        command = shlex.join(["mtl", "reproduce", key, f"scale={scale}"])
        if OVERRIDES in self.runs.columns:
            overrides = self.runs[OVERRIDES][0]
            setup.append(Bold(f"These are not the runs of the file: the command line has {overrides}."))
            command = f"{command} {overrides}"
        provenance = [command]
        if {"epochs", "seconds_per_epoch"} <= set(self.runs.columns):
            seconds = self.runs.select((pl.col("epochs") * pl.col("seconds_per_epoch")).sum()).item()
            provenance.append(f"{len(self.runs)} runs, {seconds / 3600:.1f} hours of training in all")
        provenance.append(f"Settings, claims and published numbers: conf/paper/{key}.yaml")
        counts = {verdict: verdicts.count(verdict) for verdict in _DECISIVE if verdict in verdicts}
        counted = ", ".join(f"{n} {'hold' if text == 'holds' and n > 1 else text}" for text, n in counts.items())
        lead: list[list[str | Link]] = [[*setup, f"Scale {scale}: {self.paper.scale.note}."]]
        if verdicts:
            rules = Link("Rules", RULES) if (folder / RULES).exists() else f"Rules: benchmarks/accuracy/{RULES}"
            left = f"Not run: {verdicts.count(ClaimStatus.NOT_RUN)} of {len(verdicts)} claims."
            lead.append([*([Bold(f"Claims that were run: {counted}.")] if counts else []), left, rules])
        title = f"{self.paper.file.title}: {self.paper.file.source}"
        return Page(title, self.sections, self.runs, provenance, lead)


def report_of(
    paper: Paper, text: str, kept: Kept, searches: Mapping[str, Trials], stored: Mapping[str, Judgement] | None = None
) -> Report:
    """Return what the runs in a CSV file with this ``text`` tell; ``searches`` and ``stored``: as in ``judged``."""
    table = pl.read_csv(StringIO(text), infer_schema_length=None) if text.strip() else pl.DataFrame()
    groups = groups_of(table)
    joint_tables = {key: joint_runs(joint, groups, paper.methods) for key, joint in paper.file.tables.items()}
    joints = {key: runs for key, runs in joint_tables.items() if runs}
    judgements = judged(paper, groups | joints, searches, stored or {})
    ordered = [judgement for verdict in _DECISIVE for judgement in judgements if judgement.verdict == verdict]
    rows = [[judgement.claim.text, _marked(judgement.verdict), judgement.reason] for judgement in ordered]
    tables = [Table(HEADER, rows)] if rows else []
    sections = [Section("Claims" if rows else "Remarks", tables=tables, notes=paper.file.remarks)]
    sections = sections if rows or paper.file.remarks else []
    for key, runs in joints.items():
        sections.append(section_of_joint(paper.file.tables[key], runs, paper.methods, paper.published().get(key, {})))
    for group in paper.groups:
        if group.key in groups:
            figures = kept[group.name].figures if group.name in kept else ()
            sections.append(replace(section(paper, group, groups[group.key]), figures=figures))
        sections += [kept[title] for title in (f"{group.name}: search",) if title in kept]
    sections += [kept[title] for title in ("Figures",) if title in kept]
    return Report(paper, table, judgements, sections)


def _marked(verdict: ClaimStatus) -> str:
    return Bold(verdict) if verdict == ClaimStatus.CONTRADICTED else str(verdict)


def groups_of(table: pl.DataFrame) -> dict[str, Runs]:
    """Return the runs of each group in the table of a page, without the columns that only other groups have."""
    lacking = {"state": FINISHED, "run": "", "reason": None}  # in the first pages
    table = table.with_columns(**{name: pl.lit(value) for name, value in lacking.items() if name not in table.columns})
    totals = {total: name for name, total in TOTALS.items() if total not in table.columns}
    computed = {total: name for total, name in totals.items() if {name, "epochs"} <= set(table.columns)}
    table = table.with_columns(**{total: pl.col(name) * pl.col("epochs") for total, name in computed.items()})
    measured = [name for name in table.columns if name not in lacking]
    parts = table.partition_by("group", as_dict=True) if "group" in table.columns else {}
    return {
        str(key): Runs(rows.drop(name for name in measured if rows[name].null_count() == len(rows)), "gate", {})
        for (key,), rows in parts.items()
    }


def judged(
    paper: Paper, groups: Mapping[str, Runs], searches: Mapping[str, Trials], stored: Mapping[str, Judgement]
) -> list[Judgement]:
    """Return the judgement of each claim, also of those on groups and methods that have no runs.

    ``stored``: judgements, by the text of the claim, that count where runs and searches do not have the numbers.
    """
    judgements, columns = [], {column for runs in groups.values() for column in runs.table.columns}
    for claim in paper.file.claims:
        names = {key: name_of(key, paper.file.methods[key]) for key in (claim.method, *claim.than)}
        runs, trials = groups.get(claim.group), searches.get(claim.group)
        measured = trials if claim.times else {claim.column, claim.other or claim.column} <= columns
        if claim.text in stored and not measured:
            judgements.append(stored[claim.text])
        elif claim.times:
            pairs = {key: pairs_of(trials, name, claim.column) for key, name in names.items()} if trials else {}
            judgements.append(judge_search(claim, pairs, names, claim.higher))
        else:
            values = {key: runs.values(name, claim.column) for key, name in names.items()} if runs else {}
            if runs and claim.other:
                values[claim.other] = runs.values(names[claim.method], claim.other)
            shares = {key: list(runs.values(name, BINARY).values()) for key, name in names.items()} if runs else {}
            judgements.append(judge(claim, values, names, shares, runs.overlap if runs else 0.0))
    return judgements


def runs_table(
    paper: Paper, groups: Mapping[str, Runs], chosen: Chosen, folder: Path, changed: Sequence[str]
) -> pl.DataFrame:
    """Return the runs of all groups, with their paths below ``folder``; further arguments as for ``write``."""
    tables = []
    for key, runs in groups.items():
        texts = dict[str, str]()
        for method in paper.methods:
            overrides, number = chosen.get((key, method.key), ([], 0))
            texts |= {method.name: f"{' '.join(overrides)} (trial {number} of the search)"} if overrides else {}
        path = pl.col("run", "reason").str.replace_all(f"{folder.absolute()}/", "", literal=True)
        path = path.str.replace_all(f"{folder}/", "", literal=True)
        columns = [pl.lit(key).alias("group"), path, pl.exclude("run", "reason")]
        setting = pl.col("setting").replace_strict(texts, default=None, return_dtype=pl.String)
        columns += [setting.alias(CHOSEN)] if texts else []
        columns += [pl.lit(shlex.join(changed)).alias(OVERRIDES)] if changed else []
        tables.append(runs.table.with_columns(pl.col("run", "reason").cast(pl.String)).select(columns))
    return pl.concat(tables, how="diagonal_relaxed") if tables else pl.DataFrame()


def runs_of(paper: Paper, group: Part, chosen: Chosen, folder: Path) -> Runs | None:
    """Return the runs of a group that have begun; None if none has."""
    named: dict[Path, tuple[str, int | None]] = {}
    for row in paper.rows_of(group):
        label = paper.setting(row, *chosen[row.key]).label
        for number in range(paper.scale.seeds or 0):
            if (path := run_folder(folder, label, number)).exists():
                named[path] = row.method.name, paper.file.seed + number
    return read_named_runs(named, "gate") if named else None


def pairs_of(trials: Trials, method: str, column: str) -> TrialValues:
    """Return the validation value and the value of ``column`` of each finished trial of a method."""
    table = trials.runs.table.filter(setting=method, state=FINISHED)
    return table.select(trials.validation, column).rows() if column in table.columns else []


def section(paper: Paper, group: Part, runs: Runs) -> Section:
    """Return the section on one table."""
    theirs = paper.published().get(group.key, {})
    methods = [method for method in paper.methods if method.name in runs.table["setting"]]
    published: Published = {method.name: theirs[method.key] for method in methods if method.key in theirs}
    measured = [method for method in paper.methods if any(runs.values(method.name, FLOPS).values())]
    baseline = next((method.name for method in measured if method.key == paper.file.baseline), None)
    columns = [name for name in paper.file.columns if name in runs.table.columns]
    unit = "trials" if paper.scale.best else "seeds"
    table_section = section_of(runs, group.name, columns=columns, published=published, baseline=baseline, unit=unit)
    lines = []
    if CHOSEN in runs.table.columns:
        choices = runs.table.select("setting", CHOSEN).unique(maintain_order=True).drop_nulls()
        lines = [": ".join(row) for row in choices.rows()]
    planned, done = len(paper.rows_of(group)) * (paper.scale.seeds or 0), runs.table["state"].to_list().count(FINISHED)
    lines += [f"{done} of {planned} runs have been done so far."] if done < planned else []
    return replace(table_section, notes=[*table_section.notes, *lines])


def show(judgements: Sequence[Judgement], report: Path) -> None:
    """Print the verdicts, and where the report is."""
    console = Console(highlight=False)
    rows = [[judgement.claim.text, str(judgement.verdict), judgement.reason] for judgement in judgements]
    if rows:
        console.print(Table(HEADER, rows))
    console.print(str(report), soft_wrap=True, markup=False)
