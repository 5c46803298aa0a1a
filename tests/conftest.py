"""Fixtures of all tests: a fixed seed, and small data sets."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import mtl  # noqa: F401  # before any file of tests imports Lightning or torch

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the processors, and so do the programs that they start
    os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported
    os.environ["POLARS_MAX_THREADS"] = "1"

for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:  # started by nohup or in the background: the program would keep it
        signal.signal(_number, _handler)


LONG = ("test_configs", "test_table_models")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker is left with one of them when the others have ended."""
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_collection_finish() -> None:
    """Leave the imported modules out of later garbage collections, which are rarer: a tenth of the tests' time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def _clean_tree() -> Iterator[None]:
    """Fail if the tests leave a file or folder in the repository: they have tmp_path."""
    before = {path.name for path in ROOT.iterdir()}
    yield
    left = sorted({path.name for path in ROOT.iterdir() if path.name[0] != "."} - before - {"__pycache__"})
    assert not left, f"the tests left {', '.join(left)} in {ROOT}"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Start each test from the same seed."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def few_trees() -> Iterator[None]:
    """Let the models of a blend be small in a test."""
    from tests import trees

    with trees.few_trees():
        yield


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let figures be drawn as a few bytes: a picture takes longer than a page without it."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: file.write(bytes(24)))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with small files of every data set that has any."""
    from tests.tiny_data import write_tiny_data  # most tests need neither the files nor what writes them

    return write_tiny_data(tmp_path_factory.mktemp("data") / "sets")
