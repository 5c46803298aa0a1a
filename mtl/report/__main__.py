"""Compare runs: ``python -m mtl.report outputs/multirun/DATE/SWEEP``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mtl.checks import InputError


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, print the table of the runs, and write summary.csv and summary.md.

    They are written into the folder; if there are several, into the current one.
    """
    parser = argparse.ArgumentParser(prog="python -m mtl.report", description=__doc__)
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="FOLDER", help="folder of a sweep, or any folder that contains runs"
    )
    parser.add_argument(
        "--also", nargs="+", default=[], metavar="NAME", help="more columns of summary.csv, as experts_per_sample"
    )
    given = parser.parse_args(arguments)
    from mtl.report.summary import show, write  # takes seconds, --help does not

    target = given.folders[0] if len(given.folders) == 1 else Path()
    try:
        runs, comparison = write(given.folders, target, given.also)
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
    show(runs, comparison, target)


if __name__ == "__main__":
    main()
