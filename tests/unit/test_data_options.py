"""Arguments of the data modules: every value of a wrong type or size is one sentence, before any file is touched."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
from mtl.data_modules import options
from mtl.data_modules.base import TensorDataModule
from mtl.data_modules.books import BooksDataModule
from mtl.data_modules.celeba import CelebADataModule
from mtl.data_modules.digits import DigitsDataModule
from mtl.data_modules.four_mnists import FourMNISTsDataModule
from mtl.data_modules.glue import GlueDataModule
from mtl.data_modules.interactions import InteractionsDataModule
from mtl.data_modules.jester import JesterDataModule
from mtl.data_modules.movielens import MovieLensDataModule
from mtl.data_modules.multi_mnist import MultiMNISTDataModule
from mtl.data_modules.omniglot import OmniglotDataModule
from mtl.data_modules.squad import SquadDataModule
from mtl.data_modules.synthetic_moe import SyntheticMoEDataModule
from mtl.data_modules.synthetic_pairs import SyntheticPairsDataModule
from mtl.data_modules.synthetic_recovery import SyntheticRecoveryDataModule
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.task_batches import TasksDataModule
from mtl.data_modules.text import TextDataModule
from mtl.data_modules.text_tasks import TextTasksDataModule

from mtl.checks import InputError

NEEDED: dict[type[TensorDataModule], dict[str, Any]] = {
    BooksDataModule: {"data_dir": "nowhere"},
    CelebADataModule: {"data_dir": "nowhere", "attributes": ["Smiling"]},
    DigitsDataModule: {"data_dir": "nowhere"},
    FourMNISTsDataModule: {"data_dir": "nowhere"},
    GlueDataModule: {"data_dir": "nowhere"},
    JesterDataModule: {"data_dir": "nowhere"},
    MovieLensDataModule: {"data_dir": "nowhere"},
    MultiMNISTDataModule: {"data_dir": "nowhere"},
    OmniglotDataModule: {"data_dir": "nowhere"},
    SquadDataModule: {"data_dir": "nowhere"},
    SyntheticMoEDataModule: {},
    SyntheticPairsDataModule: {},
    SyntheticRecoveryDataModule: {},
    TableDataModule: {"path": "nowhere.csv", "tasks": {"y": {"kind": "binary"}}},
    TextDataModule: {},
}
NOTHING, TRUE = [None], [True]
NUMBERS = [-1, 1.5, math.nan, math.inf, -math.inf, 1e99, 10**40, -0.0001]
TEXTS = ["", "abc", "\x1b[31m", "x" * 300, "nul\0", "a\nb", "~no/such/user", "\ud800", "file:///etc/passwd", "${seed}"]
LISTS = [
    [],
    ["a", "a"],
    [None],
    [1],
    [[1]],
    [math.nan, 0.5, 0.5],
    [-1, 1, 1],
    [True, True, True],
    [10**30] * 3,
    {"a": 1},
]
BAD_FOR = {  # what no option of that annotation accepts
    "Long": [*NOTHING, *TRUE, *NUMBERS, *TEXTS, *LISTS],
    "RunSeed": [*NOTHING, *TRUE, *NUMBERS, *TEXTS, *LISTS],
    "Order": [*NOTHING, *TRUE, *NUMBERS, *TEXTS, *LISTS],
    "Annotated[float, Field(ge=0.1, le=1000000.0)]": [*NOTHING, *TRUE, -1, 0, math.nan, math.inf, *TEXTS, *LISTS],
    "Annotated[int, Field(ge=1, le=10000)]": [*NOTHING, *TRUE, *NUMBERS, *TEXTS, *LISTS],
    "FilePath | None": [*TRUE, *NUMBERS, "", "nul\0", *LISTS],
    "FilePath": [*NOTHING, *TRUE, *NUMBERS, "", "nul\0", "\x1b[31m", "\ud800", *LISTS],
    "Name | None": [*TRUE, *NUMBERS, "", *LISTS],
    "Any": [*TRUE, *NUMBERS, *TEXTS, *LISTS],
    "int": [*NOTHING, *TRUE, *NUMBERS, *TEXTS, *LISTS],
    "int | None": [*TRUE, *NUMBERS, *TEXTS, *LISTS],
    "float": [*NOTHING, *TRUE, *[n for n in NUMBERS if n not in (-1, 1.5, -0.0001)], *TEXTS, *LISTS],
    "bool": [*NOTHING, 0, 1, "maybe", "true", *NUMBERS, *TEXTS, *LISTS],
    "Literal": [*NOTHING, *TRUE, *NUMBERS, *TEXTS, *LISTS],
    "str": [*NOTHING, *TRUE, *NUMBERS, "", "nul\0", "\x1b[31m", "\ud800", *LISTS],
    "str | None": [*TRUE, *NUMBERS, "", *LISTS],
    "Sequence[int]": [*NOTHING, *TRUE, *NUMBERS, *TEXTS, *LISTS],
    "Sequence[float]": [*NOTHING, *TRUE, *NUMBERS, *TEXTS, *LISTS],
    "Sequence[str]": [*NOTHING, *TRUE, *NUMBERS, *TEXTS, ["a", "a"], [None], [1], [[1]], {"a": 1}],
    "Sequence[int] | None": [*TRUE, *NUMBERS, *TEXTS, *LISTS],
    "Sequence[str] | None": [*TRUE, *NUMBERS, *TEXTS, ["a", "a"], [None], [1], {"a": 1}, []],
    "str | Sequence[str]": [*NOTHING, *TRUE, *NUMBERS, *TEXTS, *LISTS],
    "Mapping[str, int] | None": [*TRUE, *NUMBERS, *TEXTS, *LISTS],
    "Mapping[str, Mapping[str, Any]] | None": [*TRUE, *NUMBERS, *TEXTS, *LISTS],
    "Mapping[str, Sequence[str]] | None": [*TRUE, *NUMBERS, *TEXTS, *LISTS],
    "Mapping[str, str | None] | None": [*TRUE, *NUMBERS, *TEXTS, *LISTS],
}


def annotations(kind: type[TensorDataModule]) -> dict[str, str]:
    """Return the annotation of each option of a data module, those of its base classes included."""
    found: dict[str, str] = {}
    for base in (TensorDataModule, TasksDataModule, TextTasksDataModule, InteractionsDataModule, kind):
        if issubclass(kind, base):
            parameters = inspect.signature(base.__init__).parameters
            found |= {name: str(p.annotation) for name, p in parameters.items() if name not in ("self", "common")}
    return found


def refusal(kind: type[TensorDataModule], options: dict[str, Any]) -> str:
    """Return the message that refuses ``options``."""
    try:
        kind(**{"batch_size": 8} | NEEDED[kind] | options)
    except InputError as error:
        return str(error)
    pytest.fail(f"{options} was accepted")


@pytest.mark.parametrize("kind", NEEDED, ids=lambda kind: kind.__name__)
def test_every_bad_value_of_every_option_is_one_sentence(kind: type[TensorDataModule]) -> None:
    tried = 0
    for name, annotation in annotations(kind).items():
        for value in BAD_FOR["Literal" if annotation.startswith("Literal") else annotation]:
            message = refusal(kind, {name: value})
            assert name in message, (name, value, message)
            assert message.isprintable(), (name, value)
            assert len(message) < 1200, (name, value, len(message))
            tried += 1
    assert tried > 150


def test_whole_numbers_in_range_are_returned() -> None:
    assert options.whole("seed", 3) == 3
    with pytest.raises(InputError, match=r"^data\.rows=7: must be a whole number from 1 to 6$"):
        options.whole("rows", 7, 1, 6)


def test_values_are_shown_in_the_words_of_yaml() -> None:
    shown = {None: "null", True: "true", 1.5: "1.5", "abc": "abc", "": "''", " a": "' a'", "\x1b": "'\\x1b'"}
    assert {value: options.shown(value) for value in shown} == shown
    assert options.shown([1, None, {"a": "b"}]) == "[1,null,{a: b}]"
    assert options.shown("x" * 100) == "x" * 60 + "..."
    assert options.shown(10**5000) == "a number of about 5000 digits"


@pytest.mark.parametrize("url", ["http://a.org/x", "https://a.org:8080"])
def test_http_addresses_are_accepted(url: str) -> None:
    assert options.address("base_url", f"{url}/") == url


@pytest.mark.parametrize(
    "url",
    ["file:///tmp", "ftp://a.org", "a.org", "http://", "http://a b", "http://a:port", "http://[", "http://a/\x1b"],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"data\.base_url=.*: must be an address that starts with http:// or https://"):
        options.address("base_url", url)


def test_rows_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "machine_memory", lambda: 1_000_000)
    with pytest.raises(InputError, match=r"data\.rows, .* need 0\.0211 GB of memory, this machine has 0\.001 GB"):
        SyntheticPairsDataModule(batch_size=8, rows=[10_000, 1, 1], input_dim=128)
    with pytest.raises(InputError, match=r"data\.rows=\[1000,1,1\]: its pictures need"):
        MultiMNISTDataModule("data", rows=[1000, 1, 1], batch_size=8)


def test_folders_below_home_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert options.path("data_dir", "~/data", "a folder") == Path("/home/someone/data")


@pytest.mark.parametrize("name", ["", " a", "a/b", "a.b", "a\\b", "a\nb", 1, None, True, "x" * 101])
def test_unsuitable_names_of_tasks_are_refused(name: Any) -> None:
    with pytest.raises(InputError, match=r"^data\.tasks: .* cannot be the name of a task"):
        options.check_task_name("data.tasks", name)
