"""Private names of other libraries: each is there and does what it should, and the program does without it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from mtl import compat


@pytest.mark.parametrize("name", compat.REGISTER)
def test_name_is_there_and_works(name: str) -> None:
    """A failure says what to do: repair the entry, or live with its fallback."""
    entry = compat.REGISTER[name]
    consequence = f"it was used because {entry.why}; without it: {entry.fallback}"
    try:
        found = entry.find()
    except Exception as error:
        pytest.fail(f"{name} is gone ({error!r}); {consequence}")
    assert entry.works(found), f"{name} behaves in another way; {consequence}"
    compat.lookup.cache_clear()
    assert compat.lookup(name) is not None


@pytest.mark.parametrize("broken", [AttributeError("gone"), None, TypeError("other arguments")], ids=repr)
def test_lookup_of_a_broken_name_is_none(broken: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> object:
        if isinstance(broken, AttributeError):
            raise broken
        return object()

    def works(found: object) -> bool:
        if isinstance(broken, TypeError):
            raise broken
        return False

    monkeypatch.setitem(compat.REGISTER, "some.name", compat.PrivateName("speed", "none", find, works))
    assert compat.lookup("some.name") is None


def test_sections_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    node = OmegaConf.create({"a": {"b": {}}}).a.b
    assert compat.config_path(node) == "a.b"
    monkeypatch.setattr(compat, "lookup", lambda name: None)
    assert compat.config_path(node) == ""


def test_torchmetrics_is_left_to_those_who_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(compat.sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "lookup", lambda name: None)
        patch.delitem(compat.sys.modules, "torchmetrics")
        compat.prepare_imports()
        assert "torchmetrics" not in compat.sys.modules
    assert dict(compat.sys.modules) == before


def test_torchvision_is_left_alone_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compat._library
    monkeypatch.setitem(compat.sys.modules, "torchvision", SimpleNamespace())
    compat.prepare_imports()
    assert compat._library is before
