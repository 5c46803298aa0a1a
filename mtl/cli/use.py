"""The commands on a run, such as predict, explain, export and serve. Slow imports are in functions."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mtl import __version__
from mtl.checks import require
from mtl.cli.errors import one_line_errors
from mtl.config.early import check_rows
from mtl.files.cloud import path_of
from mtl.files.run_files import PREDICTIONS, checkpoint_path, find_checkpoint
from mtl.files.writing import check_out
from mtl.runs.commands import program, relative_to_cwd

INTERVAL = "add the ends of intervals that hold this share of the labels of regressions, such as 0.9"
FIRST = 10  # rows that mtl predict and explain print without -o
EFFECTS = (
    "Effect of a cell: the prediction (of classes: the probability of yes, or of the\n"
    "class) minus its mean with the cells of {} other rows in this place."
)
DRIFTED = 3  # exit code of mtl drift if the rows have changed; errors exit with 1 or 2


def parser_of(name: str, text: str, out: str | None = None) -> ArgumentParser:
    """Return the argument parser of a command on a run; ``out``: the default output of a command."""
    parser = ArgumentParser(prog=" ".join(program(name)), description=f"{text}: mtl {name} RUN")
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run, or one of its checkpoints")
    add("--trust", action="append", default=[], metavar="PACKAGE", help="your package, whose classes are trusted too")
    yaml = "your own YAML files, whose classes are trusted"
    add("--config-dir", action="append", default=[], metavar="FOLDER", help=yaml)
    add("--version", action="version", version=f"mtl {__version__}")
    if out:
        add("--out", type=Path, help=f"where to write; default RUN/{out}")
    return parser


def add_model(parser: ArgumentParser) -> None:
    """Add the option that chooses one of the models of a run."""
    chosen = "network, linear, lightgbm or catboost alone; default: their blend if the run has one"
    parser.add_argument("--model", metavar="NAME", help=chosen)


def parse_arguments(parser: ArgumentParser, arguments: Sequence[str] | None) -> Namespace:
    """Parse the arguments, check that runs and rows exist, and trust the classes that ``--config-dir`` names."""
    args = parser.parse_args(arguments)
    runs = [args.run, args.other] if "other" in args else [args.run]
    for run in runs:
        if len(runs) == 1 or not Path(run).is_dir():  # mtl compare also takes folders of mtl evaluate
            find_checkpoint(run)
    if "force" in args and args.out is not None:
        check_out(args.out, args.rows or Path(args.run) / PREDICTIONS, args.force)
    for rows in filter(None, (getattr(args, name, None) for name in ("rows", "reference"))):
        check_rows(rows)
    if args.config_dir:
        from mtl.checkpoints.trust import classes_in

        args.trust += classes_in(args.config_dir)
    return args


def add_table(parser: ArgumentParser, rows: str, nargs: str | None = None) -> None:
    """Add the arguments of a command that makes a table from the rows of a file; ``rows`` describes that file.

    ``nargs``: "?" if the file may be left out.
    """
    parser.add_argument("rows", type=path_of, nargs=nargs, help=rows)
    out = f"file to write: .csv, .tsv or .parquet; default: show the table, of rows the first {FIRST}"
    parser.add_argument("-o", "--out", type=Path, help=out)
    parser.add_argument("--force", action="store_true", help="replace the file to write if it exists")
    parser.add_argument("--device", help="such as cpu or cuda:1; default a GPU if there is one")
    add_model(parser)


def load_networks(args: Namespace, *others: str) -> Any:
    """Return the network of ``args.run``, or a list of it and those of ``others``."""
    from mtl.use.trained import load

    networks = [load(run, args.trust, args.device, model=args.model) for run in (args.run, *others)]
    return networks if others else networks[0]


def write_table(args: Namespace, table: Any, content: str) -> None:
    """Write a table to ``args.out`` and print that; ``content`` says what the table has."""
    from mtl.use.predict import table_file

    with table_file(args.out) as write:
        write(table)
    print(f"{args.out}: {content}")


def beside(run: str, name: str) -> Path:
    """Return the path ``name`` in the folder of a run, which is named as for ``mtl.load``."""
    return checkpoint_path(run).absolute().parent.parent / name


def predict(arguments: Sequence[str] | None = None) -> None:
    """Write or show the predictions for the rows of a file."""
    parser = parser_of("predict", "Predict the rows of a file")
    columns = "a .csv, .csv.gz, .tsv or .parquet file with the columns of the training"
    parser.add_argument("rows", type=path_of, help=columns)
    parser.add_argument("-o", "--out", type=Path, help=f"file to write, in such a format; default: show {FIRST} rows")
    parser.add_argument("--tasks", type=names, metavar="A,B", help="the tasks to predict; default all")
    kept = "columns of the rows to keep; default all, '' for none"
    parser.add_argument("--keep", type=names, metavar="A,B", help=kept)
    parser.add_argument("--experts", action="store_true", help="add the experts that each row used, with their weights")
    parser.add_argument("--interval", type=float, metavar="LEVEL", help=INTERVAL)
    parser.add_argument("--batch-size", type=int, default=4096, help="rows that the network computes at once")
    parser.add_argument("--force", action="store_true", help="replace the file to write if it exists")
    parser.add_argument("--device", help="such as cpu or cuda:1; default a GPU if there is one")
    add_model(parser)
    with one_line_errors():
        args = parse_arguments(parser, arguments)
        from mtl.use.predict import predict_file, predicted, show
        from mtl.use.trained import load

        options = {"tasks": args.tasks, "keep": args.keep, "experts": args.experts}
        options |= {"batch_size": args.batch_size, "interval": args.interval}
        if args.out is not None:
            loading = args.trust, args.device, args.model
            count = predict_file(args.run, args.rows, args.out, args.force, *loading, **options)
            print(f"{args.out}: predictions for {count:,} rows")
            return
        block, share = next(predicted(load(args.run, args.trust, args.device, model=args.model), args.rows, **options))
        show(block[:FIRST])
        if share < 1 or len(block) > FIRST:
            print("These are the first rows: add -o FILE to write the predictions for all of them.")


def importance(arguments: Sequence[str] | None = None) -> None:
    """Show or write how much worse each task becomes if a column of the rows of a file is shuffled."""
    parser = parser_of("importance", "Rank the columns by how much worse each task becomes if they are shuffled")
    add_table(parser, "a table with the columns of the training and labels: test rows, say")
    parser.add_argument("--repeats", type=int, default=5, help="shuffles of each column; default 5")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffles; default 0")
    with one_line_errors():
        args = parse_arguments(parser, arguments)
        from mtl.use.predict import read_rows, show

        model = load_networks(args)
        table = model.importance(read_rows(model, args.rows), args.repeats, args.seed, str(args.rows))
        if args.out is None:
            return show(table)
        write_table(args, table, f"the importance of {table['column'].n_unique()} columns")


def explain(arguments: Sequence[str] | None = None) -> None:
    """Show or write which cells raise or lower the predictions of rows, and show the experts that they used."""
    parser = parser_of("explain", "Say which cells of a row raise or lower its predictions")
    add_table(parser, "a table with the columns of the training")
    parser.add_argument("--reference", type=path_of, metavar="FILE", help="the rows to compare with; default the same")
    parser.add_argument("--tasks", type=names, metavar="A,B", help="the tasks to explain; default all")
    parser.add_argument("--samples", type=int, default=20, help="other cells that a cell is compared with; default 20")
    parser.add_argument("--seed", type=int, default=0, help="of the samples; default 0")
    with one_line_errors():
        args = parse_arguments(parser, arguments)
        from mtl.use.effects import in_words
        from mtl.use.predict import read_rows, show

        model = load_networks(args)
        frame = read_rows(model, args.rows)
        reference = frame if args.reference is None else read_rows(model, args.reference)
        shown = frame if args.out else frame[:FIRST]
        effects = model.explain(shown, args.tasks, reference, args.samples, args.seed, str(args.rows))
        if args.out is None:
            table = in_words(model, shown, effects, model.tasks_named(args.tasks))
            show(table, wrap=True)
            print(EFFECTS.format(args.samples), *["Experts: number:weight."] * ("experts" in table.columns), sep="\n")
            return
        write_table(args, effects, f"effects of {effects['column'].n_unique()} columns on {len(shown):,} rows")


def drift(arguments: Sequence[str] | None = None) -> None:
    """Show or write how the rows of a file differ from the training rows; exit with ``DRIFTED`` if they do."""
    parser = parser_of("drift", f"Compare the rows of a file with the training rows (exit code {DRIFTED} if changed)")
    add_table(parser, "a table with the columns of the training")
    changed = "population stability index above which a column has changed; default 0.2"
    parser.add_argument("--threshold", type=float, default=0.2, help=changed)
    with one_line_errors():
        args = parse_arguments(parser, arguments)
        from mtl.use.drift import describe_drift, format_drift
        from mtl.use.predict import read_rows, show

        model = load_networks(args)
        frame = read_rows(model, args.rows)
        table = model.drift(frame, args.threshold, where=str(args.rows))
        if args.out is None:
            show(format_drift(table))
        else:
            write_table(args, table, f"{len(table)} columns and predictions")
        print(describe_drift(table, len(frame)))
        if table["drifted"].any():
            sys.exit(DRIFTED)


def compare(arguments: Sequence[str] | None = None) -> None:
    """Show or write by how much the network of another run is better, on the test rows or those of a file."""
    parser = parser_of("compare", "Compare the networks A and B of two runs on the same rows with labels")
    parser.add_argument("other", metavar="RUN_B", help="another run, whose network is B")
    rows = "a table with the columns and labels of both; default: what both runs have predicted for their test rows"
    add_table(parser, rows, nargs="?")
    margin = "such as 0.01: of an AUROC or accuracy 0.01, of an error 1 %% of A's; default any"
    parser.add_argument("--margin", type=float, help=f"difference that would matter, {margin}")
    by = "also compare the rows of each value of this column of the table"
    parser.add_argument("--by", metavar="COLUMN", help=by)
    parser.add_argument("--resamples", type=int, help="of the bootstrap; default 1000, for more than 64 tasks 100")
    parser.add_argument("--seed", type=int, default=0, help="of the resamples; default 0")
    with one_line_errors():
        args = parse_arguments(parser, arguments)
        from rich.console import Console

        from mtl.use.compare import compare, compare_runs, in_words, of_many_tasks
        from mtl.use.predict import read_rows, show

        if args.rows is None:
            a, b = (Path(run) if Path(run).is_dir() else beside(run, "") for run in (args.run, args.other))
            require(args.by is None, f"--by {args.by}: give the table with this column, mtl compare RUN_A RUN_B FILE")
            table = compare_runs(a, b, args.margin, args.resamples, args.seed, args.model)
        else:
            a, b = load_networks(args, args.other)
            options = args.margin, args.by, args.resamples, args.seed, str(args.rows)
            table = compare(a, b, read_rows(a, args.rows), *options)
        many = of_many_tasks(table)
        if args.out is not None:
            write_table(args, table, f"{len(table)} comparisons")
        elif not many:
            show(table if args.by else table.drop("by"))
        for part in many:
            Console(width=None if sys.stdout.isatty() else 120).print(part)
        if not many:
            print("\n".join(in_words(table, args.margin)))
        elif args.out is None:
            print("-o FILE writes each task" + (f" and value of {args.by}." if args.by else "."))


def export(arguments: Sequence[str] | None = None) -> None:
    """Write the network of a run as a program for other places, and print how well it agrees."""
    parser = parser_of("export", "Export a trained network as a program that needs torch alone", "exported")
    parser.add_argument("--onnx", action="store_true", help="also write model.onnx (needs pip install -e '.[onnx]')")
    add_model(parser)
    with one_line_errors():
        args = parse_arguments(parser, arguments)
        from mtl.use.export import export_run

        folder = Path(relative_to_cwd(args.out or beside(args.run, "exported")))
        report = export_run(args.run, folder, args.onnx, args.trust, args.model)
        for file, value in report["differences"].items():
            print(f"{folder / file}: differs from the network by at most {value:.1e} on random rows")
        if report["dense"]:
            print(f"all experts are computed in {', '.join(report['dense'])}, since the gate depends on the example")
        print(f"{folder / 'preprocessing.json'}: how rows become inputs, and what the outputs are")


def card(arguments: Sequence[str] | None = None) -> None:
    """Write a folder for a model hub: weights, their description and a model card."""
    parser = parser_of("card", "Write weights, a description and a model card for a model hub", "card")
    with one_line_errors():
        args = parse_arguments(parser, arguments)
        from mtl.use.card import FILES, write_card

        folder = args.out or beside(args.run, "card")
        write_card(beside(args.run, ""), folder, args.trust)
        print(f"{relative_to_cwd(folder)}: {', '.join(FILES)}; mtl.load({relative_to_cwd(folder)!r}) reads it")


def prune(arguments: Sequence[str] | None = None) -> None:
    """Write the part of a run's network that each task uses, and print what it saves."""
    parser = parser_of("prune", "Extract the part of a trained network that a task uses", "pruned")
    parser.add_argument("--task", action="append", default=[], help="a task (may be repeated); default all")
    with one_line_errors():
        args = parse_arguments(parser, arguments)
        from rich.console import Console

        from mtl.files.tables import Table
        from mtl.use.prune import prune_run

        folder = args.out or beside(args.run, "pruned")
        report = prune_run(args.run, args.task, folder, args.trust)
        columns, rows = ("pruned_parameters", "parameters", "pruned_flops", "flops"), list[list[str]]()
        for task, row in report.items():
            rows.append([task, *(f"{row[name]:,}" for name in columns), f"{row['difference']:.1e}"])
        header = ("task", "parameters", "of", "flops", "of", "largest difference")
        table = Table(header, rows, "parameters and FLOPs per sample that each task keeps")
        Console(width=None if sys.stdout.isatty() else 120).print(table)
        print(relative_to_cwd(folder))


def neurons(arguments: Sequence[str] | None = None) -> None:
    """Write the scores of the hidden units of a dense Transformer run."""
    text = "Rank the hidden units of a dense Transformer run, for network.expert_init=neuron_scores"
    parser = parser_of("neurons", text, "neuron_scores.pt")
    parser.add_argument("--data-dir", metavar="FOLDER", help="the data; default as for paths.data_dir of mtl train")
    with one_line_errors():
        args = parse_arguments(parser, arguments)
        from mtl.use.neurons import write_neuron_scores

        file = args.out or beside(args.run, "neuron_scores.pt")
        layers, width = write_neuron_scores(args.run, file, args.trust, args.data_dir)
        print(f"{file}: scores of {width:,} neurons in each of {layers} layers")


def serve(arguments: Sequence[str] | None = None, server: Callable[..., None] | None = None) -> None:
    """Answer requests until a signal stops the program; ``server`` runs the application instead of uvicorn."""
    parser = parser_of("serve", "Answer requests over HTTP with a trained network")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default this machine only")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--interval", type=float, metavar="LEVEL", help=INTERVAL)
    parser.add_argument("--max-batch", type=int, default=256, help="rows of a batch, and of a request; default 256")
    parser.add_argument("--max-wait-ms", type=float, default=2.0, help="time to gather requests; default 2")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with its own network; default 1")
    add_model(parser)
    with one_line_errors():
        args = parse_arguments(parser, arguments)
        from mtl.options import Count, valid
        from mtl.use.serve import PROTOCOL, prepare, serve_in_workers

        valid(Count, args.workers, "--workers")
        prepared = {name: getattr(args, name) for name in ("trust", "max_batch", "max_wait_ms", "interval", "model")}
        app, run = prepare(args.run, **prepared)
    listening = {"host": args.host, "port": args.port, "access_log": False, "http": PROTOCOL}
    if args.workers > 1:
        serve_in_workers(server or run, args.workers, {"path": args.run, **prepared}, **listening)
    else:
        (server or run)(app, **listening)


def names(text: str) -> list[str]:
    """Return the names in a comma-separated text."""
    return [name.strip() for name in text.split(",") if name.strip()]
