"""Show a run, or compare runs or the trials of studies: ``mtl report FOLDER``, ``mtl report study=NAME``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtl.checks import require, require_packages
from mtl.cli.errors import one_line_errors
from mtl.files.run_files import RESULTS

STUDY_OVERRIDES = ("study=", "storage=", "paths.output_dir=")  # as for mtl tune


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, print the table of the runs, and write report.html, summary.md and summary.csv.

    The files are written into the folder of the runs or the study; if several are given, into the current folder.
    """
    parser = argparse.ArgumentParser(prog="mtl report", description=__doc__)
    of_study = "study=NAME [storage=URL] [paths.output_dir=FOLDER], as for mtl tune"
    folders = f"a run, or any folder that contains runs; or {of_study}"
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help=folders)
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME", help="more columns, as experts_per_sample")
    baseline = "the setting to compare with; also shows FLOPs relative to its"
    parser.add_argument("--baseline", metavar="SETTING", help=baseline)
    parser.add_argument("--curve", nargs="+", default=[], metavar="METRIC", help="more curves, as val/click/auroc")
    parser.add_argument("--latex", action="store_true", help="also write summary.tex, with the tables of the report")
    parser.add_argument("--watch", action="store_true", help="follow runs in watch.html until all have ended")
    trusted = "your package, whose classes a run may name"
    parser.add_argument("--trust", action="append", default=[], metavar="PACKAGE", help=trusted)
    where = "the data of the run; default as for paths.data_dir of mtl train"
    parser.add_argument("--data-dir", metavar="FOLDER", help=where)
    with one_line_errors():
        args = parser.parse_args(arguments)
        for folder in args.folders:
            require(folder.startswith(STUDY_OVERRIDES) or Path(folder).is_dir(), f"{folder}: no such folder")
        run = Path(args.folders[0]) if len(args.folders) == 1 else None
        if args.watch:
            watch_runs(args.folders)
            if run and (page := page_after_results(run)):
                return print(f"{page}: the page that the run has written")
        if run and not (args.also or args.baseline) and has_finished(run):
            return show_run(run, args.trust, args.curve, args.latex, args.data_dir)
        curves = dict.fromkeys(args.curve, 1)
        compare_runs(args.folders, args.latex, also=args.also, baseline=args.baseline, curves=curves)


def watch_runs(folders: Sequence[str]) -> None:
    """Watch the runs in ``folders`` until all have ended; Ctrl-C ends the program."""
    studies = [folder for folder in folders if folder.startswith(STUDY_OVERRIDES)]
    require(not studies, f"{' '.join(studies)}: --watch takes folders, such as outputs/studies/NAME")
    from mtl.report.watch import WATCH_PAGE, watch

    target = Path(folders[0]) if len(folders) == 1 else Path()
    print(f"{target / WATCH_PAGE} shows the runs and reloads itself in a browser; Ctrl-C leaves them alone", flush=True)
    try:
        watch([Path(folder) for folder in folders], target)
    except KeyboardInterrupt:
        sys.exit(0)


def page_after_results(run: Path) -> Path | None:
    """Return the page of a run that was written after its results: that of mtl.fit is of rows in memory."""
    from mtl.report.page import PAGE

    page, results = run / PAGE, run / RESULTS
    are_files = page.is_file() and results.is_file()
    return page if are_files and page.stat().st_mtime >= results.stat().st_mtime else None


def has_finished(run: Path) -> bool:
    """Return whether a folder is that of a run that has finished."""
    from mtl.report.runs import read_results

    return read_results(run)[0] is not None


def show_run(run: Path, trust: Sequence[str], curves: Sequence[str], latex: bool, data_dir: str | None = None) -> None:
    """Write the page of one finished run, whose data are in ``data_dir``, and print its metrics."""
    print(f"{run}: writing its page; of a table a few seconds, more for many columns", flush=True)
    from mtl.use.run_page import write_run_page

    sections = write_run_page(run, trust, curves=curves, places={"data_dir": data_dir} if data_dir else {})
    _show(sections, sections[:1], run, latex)


def compare_runs(arguments: Sequence[str], latex: bool = False, **options: Any) -> None:
    """Compare the runs in folders, or the trials of studies, that the ``arguments`` name.

    ``options``: as in ``section_of``. ``latex``: also write the tables in LaTeX.
    """
    options = {"curves": {}, **options}
    pairs = [argument.partition("=")[::2] for argument in arguments if argument.startswith(STUDY_OVERRIDES)]
    folders = [Path(argument) for argument in arguments if not argument.startswith(STUDY_OVERRIDES)]
    studies, options_by_name = [value for name, value in pairs if name == "study"], dict(pairs)
    require(bool(folders or studies), "give folders of runs, or study=NAME")
    require(not (folders and studies), f"{', '.join(map(str, folders))}: give folders of runs or studies, not both")
    if studies:
        require_packages("study=", "tune", "optuna", "sqlalchemy")
        from mtl.tune.storage import check_study

        folder = Path(options_by_name.get("paths.output_dir", "outputs")) / "studies"
        address = options_by_name.get("storage")
        folders = [folder / name for name in studies]
        for name in studies:
            check_study(name, address, folder / name)
    import polars as pl  # slow imports, which --help does not need

    from mtl.report.page import Page
    from mtl.report.runs import by_data, read_runs
    from mtl.report.section import baselines_of, section_of
    from mtl.report.summary import describe_runs
    from mtl.report.trials import section_of_trials

    if studies:
        from mtl.tune.trials import read_study

        trials = [read_study(name, address, folder / name) for name in studies]
        runs = [study.runs for study in trials]
        sections = [section_of_trials(study, name, **options) for study, name in zip(trials, studies, strict=True)]
    else:
        runs = [read_runs(folders)]
        sections = []
        for name, paths in by_data([Path(run) for run in runs[0].table["run"]]).items():
            part = read_runs(paths)
            section, baselines = section_of(part, name or "Comparison", **options), baselines_of(part)
            sections.append(replace(section, tables=[*section.tables, baselines]) if baselines else section)
    target = folders[0] if len(folders) == 1 else Path()
    count = f"{sum(len(group.table) for group in runs)} {'trials' if studies else 'runs'}"
    title = f"{_name(folders[0].resolve())}: {count}" if len(folders) == 1 else count
    table = pl.concat([group.table for group in runs], how="diagonal_relaxed")
    Page(title, sections, table, describe_runs([Path(run) for run in table["run"]])).write(target)
    _show(sections, sections, target, latex)


def _name(folder: Path) -> str:
    """Return the name of a folder. A sweep's folder is named by the time, and its parent by the date: both then."""
    named_by_time = re.fullmatch(r"\d\d-\d\d-\d\d", folder.name)
    return f"{folder.parent.name} {folder.name}" if named_by_time else folder.name


def _show(sections: Sequence[Any], printed: Sequence[Any], target: Path, latex: bool) -> None:
    """Print sections of the page in ``target``; ``latex``: also write the tables of all ``sections`` in LaTeX."""
    from mtl.files.writing import write_text
    from mtl.report.page import CSV, LATEX, MARKDOWN, PAGE
    from mtl.report.summary import show

    if latex:
        tables = [table for section in sections for table in (*section.tables, section.costs) if table]
        write_text(target / LATEX, "\n".join(table.latex() for table in tables))
    for section in printed:
        show(section, f"{target / PAGE} (with pictures), {MARKDOWN}, {CSV}{f', {LATEX}' if latex else ''}")
