"""Private names of other libraries: each is there and does what it should, and its fallback gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from mtl import compat, fast
from mtl.fast import matmul
from mtl.fast.experts import Entries, relu_backward
from tests.unit.test_fast import check_pair

LINEAR = "torch.ops.mkldnn._linear_pointwise"
SHUFFLE = "torch.native_channel_shuffle"
THRESHOLD = "torch.ops.aten.threshold_backward"
BAG_BACKWARD = "torch.ops.aten._embedding_bag_per_sample_weights_backward"
FUNCTORCH = "torch._C._are_functorch_transforms_active"
FULL_KEY = "omegaconf.DictConfig._get_full_key"
REQUIREMENT = "lightning_utilities.core.imports.RequirementCache"


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


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that makes ``compat.lookup`` of a name return None for the rest of the test."""
    real = compat.lookup

    def hide(name: str) -> None:
        assert name in compat.REGISTER
        monkeypatch.setattr(compat, "lookup", lambda asked: None if asked == name else real(asked))
        matmul.linear_operator.cache_clear()

    yield hide
    monkeypatch.undo()
    matmul.linear_operator.cache_clear()


def linear() -> None:
    assert not matmul.onednn_multiplies(torch.ones(1))
    a, b, bias = torch.randn(512, 256), torch.randn(256, 128), torch.randn(128)
    assert torch.equal(matmul.product(a, b, bias, relu=True), torch.addmm(bias, a, b).relu())
    assert torch.equal(matmul.products(a[None], b[None]), torch.bmm(a[None], b[None]))


def shuffle() -> None:
    for x in (torch.randn(300, 512), torch.randn(3, 5, 7), torch.randn(2, 3).double()):
        assert matmul.transposed(x).is_contiguous()
        assert torch.equal(matmul.transposed(x), x.mT)


def threshold() -> None:
    grad, h = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 5.0, 1e-30])
    assert relu_backward(grad, h).tolist() == [0.0, 2.0, 3.0]


def bag_backward() -> None:
    outputs, grad = torch.randn(4, 3), torch.randn(2, 3)
    entries = Entries(torch.tensor([3, 0, 1]), torch.tensor([0, 1, 1]), (torch.empty(0),) * 3, 2)
    expected = [outputs[3] @ grad[0], outputs[0] @ grad[1], outputs[1] @ grad[1]]
    assert torch.allclose(entries.dots(outputs, grad), torch.stack(expected))


def functorch() -> None:
    assert not compat.functorch_active()
    with fast.disabled():
        jacobian = torch.func.jacrev(lambda x: x.square())(torch.tensor([1.0, 2.0]))
    assert jacobian.tolist() == [[2.0, 0.0], [0.0, 4.0]]


def full_key() -> None:
    assert compat.config_path(OmegaConf.create({"a": {"b": {}}}).a.b) == ""


def requirement() -> None:
    before = dict(compat.sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(compat.sys.modules, "torchmetrics")
        compat.prepare_imports()
        assert "torchmetrics" not in compat.sys.modules  # left to those who need it
    assert dict(compat.sys.modules) == before


FALLBACKS = {
    LINEAR: linear,
    SHUFFLE: shuffle,
    THRESHOLD: threshold,
    BAG_BACKWARD: bag_backward,
    FUNCTORCH: functorch,
    FULL_KEY: full_key,
    REQUIREMENT: requirement,
}


def test_every_name_has_a_fallback_here() -> None:
    assert FALLBACKS.keys() == compat.REGISTER.keys()


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallback(name: str, without: Callable[[str], None]) -> None:
    without(name)
    assert compat.lookup(name) is None
    FALLBACKS[name]()


USERS = {  # of the fast functions, those whose sums and products each name takes part in
    LINEAR: ["affine", "StackedDense.outputs", "StackedDense.mixture", "StackedDense.pairs_mixture"],
    SHUFFLE: ["comet_weights", "dselect_weights", "StackedDense.mixture", "StackedDense.pairs_mixture"],
    THRESHOLD: ["StackedDense.mixture", "StackedDense.pairs_mixture", "StackedConv.mixture"],
    BAG_BACKWARD: ["StackedDense.pairs_mixture", "StackedConv.pairs_mixture"],
}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in USERS.items() for case in cases])
def test_fast_equals_plain_without_the_name(case: str, name: str, without: Callable[[str], None]) -> None:
    without(name)
    check_pair(case, 600, torch.float32)


def test_active_transforms_and_sections_of_the_configuration() -> None:
    seen: list[bool] = []
    compat.lookup.cache_clear()  # the first to ask may be inside a transform
    torch.func.vmap(lambda x: seen.append(compat.functorch_active()) or x)(torch.ones(2))
    assert seen == [True]
    assert not compat.functorch_active()
    assert compat.config_path(OmegaConf.create({"a": {"b": {}}}).a.b) == "a.b"


def test_torchvision_is_left_alone_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compat._library
    monkeypatch.setitem(compat.sys.modules, "torchvision", SimpleNamespace())
    compat.prepare_imports()
    assert compat._library is before
