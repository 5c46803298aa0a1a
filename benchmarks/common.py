"""Helpers of the benchmarks: alternating timing, medians, LibMTL, and tables in Markdown and JSON."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mtl.pipeline import memory  # mtl comes first: it sets what torch and Lightning read when they are imported

# isort: split
import torch

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
Seconds = dict[str, list[float]]


def options(description: str | None, rounds: int, **more: tuple[Callable[[str], Any], Any, str]) -> argparse.Namespace:
    """Parse ``--rounds``, ``--threads``, ``--device``, ``--out`` and ``more`` (type, default, help).

    Also set the number of threads, the seed, and the default device for new tensors.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds; each times all contenders in turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "benchmarks", help="folder for the tables")
    for name, (kind, default, text) in more.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.device != "cpu":  # setting a default device slows every call down, even cpu
        torch.set_default_device(args.device)
    memory.keep_freed_memory()  # as training does; the other libraries benefit too
    torch.manual_seed(0)
    return args


def listed(text: str) -> list[str]:
    """Return the parts of an option with commas."""
    return text.split(",")


def take_turns(contenders: Mapping[str, Callable[[], object]], rounds: int, calls: int = 6) -> Seconds:
    """Return the seconds of each call, by contender.

    In each round, every contender in turn is called ``calls`` times, so that a slow phase of the machine affects all of
    them. The first call of each block and the first round are warm-up and not counted.
    """
    seconds: Seconds = {name: [] for name in contenders}
    gc.collect()
    gc.freeze()  # keep garbage collection from scanning existing objects in every call
    for number in range(rounds + 1):
        for name, call in contenders.items():
            for repetition in range(calls):
                start = time.perf_counter()
                call()
                if torch.get_default_device().type == "cuda":
                    torch.cuda.synchronize()
                if number and repetition:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each contender, in milliseconds."""
    return {name: 1000 * statistics.median(values) for name, values in seconds.items()}


def undisturbed(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the first decile of each contender, in milliseconds: other jobs on the machine disturb it least."""
    return {name: 1000 * statistics.quantiles(values, n=10)[0] for name, values in seconds.items()}


def libmtl(module: str) -> Any:
    """Return a module of LibMTL; None if LibMTL is not installed.

    Install it outside of the project's environment: ``pip install --no-deps --target FOLDER LibMTL==1.1.5``; then start
    the benchmark with ``PYTHONPATH=FOLDER``.
    """
    gone = types.ModuleType("utils")  # a removed module of torchvision that LibMTL imports
    gone.load_state_dict_from_url = torch.hub.load_state_dict_from_url  # type: ignore[attr-defined]  # made here, unknown to mypy
    sys.modules.setdefault("torchvision.models.utils", gone)
    try:
        return importlib.import_module(f"LibMTL.{module}")
    except ImportError:
        return None


def write(args: argparse.Namespace, name: str, title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    """Print a table, and write it to ``<out>/<name>.md`` (three significant digits) and ``<out>/<name>.json``."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    where = f"{torch.get_num_threads()} threads" if args.device == "cpu" else torch.cuda.get_device_name()
    machine = {"torch": torch.__version__, "machine": processor(), "device": where}
    head = f"torch {torch.__version__}, {where}, {args.rounds} rounds. {processor()}."
    text = "\n".join([f"## {title}", "", head, *notes, "", *lines, ""])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.md").write_text(text)
    content = {"title": title, "notes": list(notes), "rounds": args.rounds, **machine, "rows": list(rows)}
    (args.out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(text)


def processor() -> str:
    """Return the name of the processor and the vector instructions that torch uses on it."""
    file = Path("/proc/cpuinfo")  # Linux
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
