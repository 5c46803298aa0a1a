"""The structure of the program: which module may import which, what may stand where, what is named how."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mtl
from mtl.cli.help import options
from mtl.cli.main import COMMANDS
from tests.conftest import ROOT
from tests.run_folders import write_run

# A room imports only rooms of the rows above its own, and rooms of one row do not import each other: no circles
ROWS = [
    {"checks", "compat", "distributed", "nn"},
    {"files", "objectives"},
    {"options", "overrides", "types"},
    {"chains"},
    {"data_modules", "experts", "loggers", "predictions"},
    {"gates"},
    {"networks"},
    {"checkpoints"},
    {"training"},
    {"analysis", "runs", "table_models"},
    {"callbacks", "report"},
    {"config"},
    {"use"},
    {"pipeline"},
    {"jobs"},
    {"tune"},
    {"paper", "sharing"},
    {"cli", "python"},
    {"__main__"},
]
# Inside data_modules, files read and fetch, tables and texts build on them, the data sets on all
ROOMS = {
    "files": {"files"},
    "tables": {"files", "tables"},
    "texts": {"files", "texts"},
}
BESIDE = ("data_modules", "callbacks", "conf")  # folders beside mtl/ that are imported as parts of it
PACKAGES = ("mtl", *BESIDE)
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> list[str]:
    """Return the dotted name of a file's module, in parts, such as ["mtl", "gates", "comet"]."""
    parts = [*path.relative_to(ROOT).with_suffix("").parts]
    return parts if parts[0] == "mtl" else ["mtl", *parts]


def imported(path: Path) -> set[str]:
    """Return the project's modules that a file imports, as dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = name_of(path)[: -node.level] if node.level else []
            module = ".".join([*start, *(node.module or "").split(".")]).strip(".")
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "mtl"}


def row(room: str) -> int:
    return next(index for index, rooms in enumerate(ROWS) if room in rooms)


def wrong_arrows(path: Path) -> list[str]:
    """Return what is wrong with the imports of one file."""
    _, room, *inner = name_of(path)
    wrong = []
    for name in imported(path) if room != "__init__" else ():  # mtl/__init__.py lists what others import from it
        _, other, *rest = [*name.split("."), ""]
        if other not in (room, "", "__version__") and row(other) >= row(room):
            wrong.append(f"{room} imports {name}, whose room is not above its own")
        if room == other == "data_modules" and len(inner) > 1 and rest[0] not in ROOMS[inner[0]]:
            wrong.append(f"data_modules.{inner[0]} imports {name}")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_follow_the_rooms(path: Path) -> None:
    assert wrong_arrows(path) == []


def test_forbidden_imports_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gates, files = ROOT / "mtl" / "gates" / "base.py", ROOT / "data_modules" / "files"
    text = "from mtl.networks.mmoe import MMoE\nimport mtl.callbacks.ema\nfrom mtl.training import losses\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert len(wrong_arrows(gates)) >= 3
    assert wrong_arrows(files / "cache.py") != []
    monkeypatch.setattr(Path, "read_text", lambda self: "from mtl.data_modules.base import RowsLoader\n")
    assert wrong_arrows(files / "cache.py") != []
    assert wrong_arrows(ROOT / "data_modules" / "celeba.py") == []


def test_packages_are_the_folders() -> None:
    """The installed package has every folder with Python files, and only nine modules stand outside of a room."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == {".".join(name_of(path)[:-1]) for path in FILES}
    assert len([path for path in (ROOT / "mtl").glob("*.py") if not path.stem.startswith("__")]) <= 9


def named_in(path: Path) -> set[str]:
    """Return the project's dotted names in a file: what it imports, and what its strings and comments mention."""
    text = path.read_text()
    names = set(re.findall(r"\bmtl(?:\.[A-Za-z_]\w*)+", text))
    return names | (imported(path) - {"mtl"} if path.suffix == ".py" and "benchmarks" in path.parts else set())


def unresolved(path: Path) -> list[str]:
    """Return the names in a file that stand for no module, class, function or attribute of the project."""
    wrong = []
    for name in sorted(named_in(path)):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            wrong.append(name)
    return wrong


def test_every_name_exists() -> None:
    """Neither mypy nor an import sees a module's name in a string, and no test runs the benchmarks."""
    paths = [*FILES, *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml"), ROOT / "ARCHITECTURE.md"]
    assert {str(path.relative_to(ROOT)): wrong for path in paths if (wrong := unresolved(path))} == {}


def test_a_name_that_is_not_there_is_found(tmp_path: Path) -> None:
    script = tmp_path / "benchmarks" / "script.py"
    script.parent.mkdir()
    script.write_text(
        'from mtl.files.run_files import RESULTS, NOTHING\nPRELOADED = ["mtl.pipeline.run", "mtl.cli.ran"]\n'
    )
    assert unresolved(script) == ["mtl.cli.ran", "mtl.files.run_files.NOTHING"]


def exported() -> set[str]:
    """Return the modules of what ``mtl`` exports, but for ``mtl.load`` and others, which need the application."""
    return {getattr(mtl, name).__module__ for name in mtl.__all__} - {
        "mtl.use.compare",
        "mtl.use.trained",
        "mtl.python.fit",
        "mtl.python.estimator",
        "mtl.python.share",
    }


def test_layer_needs_neither_hydra_nor_lightning() -> None:
    """Whoever puts the layer into a model of their own loads torch and little else."""
    wanted, others = {"mtl.training.schedules", *exported()}, set()
    seen = {"mtl"}  # it lists what it imports when it is used
    while wanted:
        name = wanted.pop()
        seen.add(name)
        folder = ROOT.joinpath(*name.split("."))
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if not path.exists():  # a name in a module
            continue
        wanted |= imported(path) - seen
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            others |= {other.split(".")[0] for other in names}
    assert others - sys.stdlib_module_names - {"mtl"} == {"numpy", "pydantic", "scipy", "torch", "typing_extensions"}


def test_only_studies_load_optuna() -> None:
    """A run loads what reports to its study, and starts no later for it; lists of runs need no Optuna."""
    studies = {path for name in ("tune", "paper") for path in (ROOT / "mtl" / name).glob("*.py")}
    commands = {ROOT / "mtl" / "cli" / f"{name}.py" for name in ("tune", "reproduce", "report")}
    for path in {*FILES} - commands - studies:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        heavy = {f"mtl.{other.parent.name}.{other.stem}" for other in studies}
        assert not {name for name in names if name.split(".")[0] in ("optuna", "sqlalchemy")} | (names & heavy), path


def test_share_and_reproduce_import_optuna_only_for_searches() -> None:
    """It is an extra, which those who search nothing need not install."""
    pending, modules = ["mtl.sharing.command", "mtl.sharing.page", "mtl.paper.command"], set[str]()
    while pending:
        if (module := pending.pop()) not in modules and (path := ROOT / f"{module.replace('.', '/')}.py").exists():
            modules.add(module)
            imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
            pending += [str(node.module) for node in imports]
            pending += [f"{node.module}.{alias.name}" for node in imports for alias in node.names]
            assert not {"optuna", "sqlalchemy"} & {str(node.module).split(".")[0] for node in imports}, path
    assert "mtl.jobs.work" in modules


def test_every_export_is_there() -> None:
    assert all(getattr(mtl, name).__name__ == name for name in mtl.__all__)
    assert {*dir(mtl)} == {*mtl.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        mtl.Nothing  # noqa: B018  # to read it is what raises


def test_only_build_instantiates() -> None:
    users = [path.name for path in FILES if "utils.instantiate" in path.read_text()]
    assert users == ["build.py"]


def test_only_the_list_of_exports_imports_for_types_alone() -> None:
    """Elsewhere an import that runs is allowed wherever its type is, so none is hidden."""
    assert [path for path in FILES if "TYPE_CHECKING" in path.read_text()] == [ROOT / "mtl" / "__init__.py"]


def test_one_module_writes_files() -> None:
    """A file is complete or absent, and a full disk is one message. Downloads and archives have rules of their own."""
    words = re.compile(r"\.write_(text|bytes)\(|os\.replace\(|temporary\.replace\(|open\((.*, )?\"w|OmegaConf\.save\(")
    files = {*FILES, ROOT / "train.py"} - {ROOT / "mtl" / "files" / "writing.py"}
    users = {str(path.relative_to(ROOT)) for path in files if words.search(path.read_text())}
    kept = {"mtl/checkpoints/files.py", "mtl/runs/console.py"}  # a second name for a file, and the null device
    assert users == kept | {"data_modules/files/download.py"}


def test_every_gate_has_file_class_and_config_of_one_name() -> None:
    files = {path.stem for path in (ROOT / "mtl" / "gates").glob("*.py")} - {
        "__init__",
        "adaptive",
        "base",
        "balance",
        "columns",
        "joined",
        "permuted",
    }
    configs = {path.stem for path in (ROOT / "conf" / "gate").glob("*.yaml")}
    assert files == configs


def test_config_files_open_with_purpose_and_example() -> None:
    for path in (ROOT / "conf").rglob("*.yaml"):
        lines = path.read_text().splitlines()
        first = lines[1] if lines[0].startswith("# @package") else lines[0]
        assert first.startswith("# "), path
        assert "Example: " in first, path
        assert not [name for name, value, _ in options(path) if value.startswith("#")], path  # in the help
    assert all(comment for name, _, comment in options(ROOT / "conf" / "train.yaml"))


MISTYPED = [["train", "gate=comt"], ["train", "gat.k=1"], ["share", "seds=3"], ["tune", "study=table", "gat.k=1"]]
MISTYPED += [["reproduce", "gates", "scal=smoke"], ["reproduce", "gates", "scale=smok"], ["reproduce", "gate"]]
MISTYPED += [
    ["tune", "trials=6"],
    ["tune", "study=table", "num_trials=6"],
    ["share", "gates=[comt]"],
    ["report", "none"],
]
MISTYPED += [["train", f"{name}=none"] for name in ("ckpt", "evaluate", "start_from", "distillation.teacher")]
MISTYPED += [["evaluate", "none"], ["train", "-m", "seed=1,2", "ckpt=none"]]
MISTYPED += [[name, "none", "none.csv"] for name in ("predict", "importance", "explain", "drift", "compare")]
MISTYPED += [[name, "none"] for name in ("export", "card", "serve", "prune", "neurons")]
MISTYPED += [["train", "ckpt=run", "data.pth=x"], ["evaluate", "run", "data.pth=x"]]  # run: a folder of a table's run
MISTYPED += [["predict", "run", "rows.csv", "-o", "none/out.csv"]]
KIND, COLUMN = "data.tasks={a: {kind: binry}}", "data.columns={a: numbr}"
TEXT = "data.tasks.a={path: none.csv, text: t, label: l, kind: binary}"
WITH_POLARS = [[name, *words, "data=table", KIND] for name, *words in (["train"], ["share"], ["tune", "study=table"])]
WITH_POLARS += [
    ["train", "data=table", COLUMN],
    ["train", "data=table", "data.path=none.csv"],
    ["train", "data=text", TEXT],
]
WITH_POLARS += [["train", "-m", "seed=1,2", "data=table", "data.path=none.csv"], ["columns", "none.csv"]]
WITH_POLARS += [["evaluate", "run", "none.csv"], ["train", "ckpt=run", KIND]]
WITH_POLARS += [["predict", "run", "none.csv"], ["compare", "run", "run", "none.csv"]]
WITH_POLARS += [["explain", "run", "rows.csv", "--reference", "none.csv"]]


QUICK = [["--help"], *([name, "--help"] for name in COMMANDS), *MISTYPED, *WITH_POLARS, ["--version"]]
FORKS = """
import atexit, json, os, sys
from mtl.cli.main import main
from mtl.config.compose import composed, opened
with opened():
    composed([])  # so that the forks need not import Hydra, find its plugins and learn its grammar
for number, words in enumerate(json.loads(sys.argv[1])):
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    else:
        for name, stream in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        names = ("torch", "transformers", "polars", "matplotlib")
        atexit.register(lambda: print("imported:", [name for name in names if name in sys.modules]))
        sys.argv[1:] = words
        main(words)
        sys.exit()
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str]]:
    """Return status, output and errors of the ``QUICK`` commands, each in a fork of a process that only has Hydra."""
    folder, command = tmp_path_factory.mktemp("quick"), [sys.executable, "-c", FORKS, json.dumps(QUICK)]
    (folder / "run" / "checkpoints").mkdir(parents=True)
    for name in ("rows.csv", "run/checkpoints/best.ckpt"):
        (folder / name).write_text("a\n1\n")
    (folder / "run" / "config.yaml").write_text("overrides: [data=table, recipe=table_quick, optimizer.lr=0.1]\n")
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"COLUMNS": "80"}, check=True, capture_output=True, text=True
    )
    files = [[(folder / f"{number}.{name}").read_text() for name in ("out", "err")] for number in range(len(QUICK))]
    return [(int(status), *texts) for status, texts in zip(done.stdout.split(), files, strict=True)]


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_help_and_mistyped_options_do_not_import_torch(words: list[str], quick: list[tuple[int, str, str]]) -> None:
    """They take half a second instead of six."""
    status, output, errors = quick[QUICK.index(words)]
    assert (status, errors[:7]) == ((0, "") if words[-1].startswith("--") else (1, "error: "))
    assert output.splitlines()[-1] == f"imported: {['polars'] if words in WITH_POLARS else []}"
    assert max(map(len, output.splitlines())) <= 80
    if words == ["evaluate", "--help"]:
        assert "mtl evaluate outputs/DATE/RUN new.csv" in output
        assert "threshold=null" in output
    if words[0] == "train" and words[-1] == "--help":
        groups = {line.split(":")[0].strip() for line in output.partition("Options of")[0].splitlines()}
        assert {"distillation", "gate", "network/gate_trunk"} <= groups
        assert groups.isdisjoint({"study", "sampler", "pruner", "paper"})  # options of other commands


def test_columns_and_report_do_not_import_lightning(tmp_path: Path) -> None:
    """They take two seconds instead of five."""
    (tmp_path / "rows.csv").write_text("a,b,label\n" + "1,x,0\n2,y,1\n" * 9)
    for number in range(2):
        write_run(tmp_path / "runs" / str(number), [f"gate={number}"], {"loss": 1.0 + number})
    code = (
        "import sys; from mtl.cli.main import main; main(sys.argv[1:])\n"
        "names = ('pytorch_lightning', 'torchmetrics', 'torchvision', 'torch._dynamo', 'transformers')\n"
        "print('imported:', [name for name in names if name in sys.modules])"
    )
    for words in (["columns", "rows.csv"], ["report", "runs"]):
        done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "imported: []"
