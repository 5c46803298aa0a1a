"""Run benchmarks several times, each in its own process, and write medians and ranges into one file.

python benchmarks/repeat.py [--times 3] [--out FOLDER] [NAME ...]. Names: step, fit_overhead, gate_cost,
experts_scaling, conv, feed (default: all). Writes ``<out>/speed.md``, and the tables of run N to ``<out>/N``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAMES = ("step", "fit_overhead", "gate_cost", "experts_scaling", "conv", "feed")


def merged(values: list[Any]) -> str:
    """Return the common value of ``values`` if they agree, else ``median [lowest, highest]``."""
    if any(value is None for value in values):
        return "-"
    if all(value == values[0] for value in values):
        return f"{values[0]:.3g}" if isinstance(values[0], float) else str(values[0])
    share = all(isinstance(value, str) and value.endswith("%") for value in values)
    if share:
        values = [float(value.rstrip("%")) for value in values]
    if not all(isinstance(value, int | float) for value in values):
        return "; ".join(map(str, values))
    middle, low, high = (f"{value:.3g}" for value in (statistics.median(values), min(values), max(values)))
    unit = " %" if share else ""
    return f"{middle}{unit} [{low}, {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE.parent / "outputs" / "benchmarks")
    given = parser.parse_args()
    for time in range(given.times):
        for name in given.names:
            command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(given.out / str(time))]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            print(f"{name}: {time + 1} of {given.times}", flush=True)
    (given.out / "speed.md").write_text(joined(given.out, given.names, given.times))
    print(given.out / "speed.md")


def joined(folder: Path, names: list[str], times: int) -> str:
    """Return the tables of ``folder/0``, ``folder/1``, ... as one text."""
    texts = []
    for name in names:
        tables = [json.loads((folder / str(time) / f"{name}.json").read_text()) for time in range(times)]
        rows = list(zip(*(table["rows"] for table in tables), strict=True))
        columns = list(dict.fromkeys(column for group in rows for column in group[0]))
        lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += [
            "| " + " | ".join(merged([row.get(column) for row in group]) for column in columns) + " |" for group in rows
        ]
        notes = [merged([table["notes"][index] for table in tables]) for index in range(len(tables[0]["notes"]))]
        texts.append("\n".join([f"## {tables[0]['title']} (`{name}.py`)", "", *notes, "", *lines, ""]))
    return "\n".join(texts)


if __name__ == "__main__":
    main()
