"""Every way to multiply gives what torch's plain product gives; which way is taken follows from the sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtl.fast import matmul
from mtl.fast.grouped import choose_variant, grouped_outer, grouped_product
from mtl.fast.matmul import onednn_multiplies, product, products, round_up, transposed

COUNTS = {
    "even": [5] * 40,
    "one long": [3] * 39 + [90],
    "some empty": [0, 4, 0, 9, 1] * 8,
    "blocks": [48, 64, 0, 32],
    "one group": [7],
}


def close(result: Tensor, expected: Tensor) -> None:
    tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-5
    assert result.shape == expected.shape
    assert torch.allclose(result, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max().clamp(min=1)))


@pytest.mark.parametrize("layout", ["plain", "left turned", "right turned", "gaps"])
@pytest.mark.parametrize("shape", [(1, 7, 3), (64, 256, 128), (512, 256, 16), (200, 512, 300)])
@pytest.mark.parametrize("relu", [False, True])
def test_product(shape: tuple[int, int, int], relu: bool, layout: str) -> None:
    m, k, n = shape
    a, b, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    a = torch.randn(k, m).t() if layout == "left turned" else a
    b = {"right turned": torch.randn(n, k).t(), "gaps": torch.randn(k, 2 * n)[:, :n]}.get(layout, b)
    expected = torch.addmm(bias.double(), a.double(), b.double()).float()
    close(product(a, b, bias, relu), expected.relu() if relu else expected)
    close(product(a, b), (a.double() @ b.double()).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(
    "shape",
    [(0, 3), (3, 0), (1, 1), (1, 9), (9, 1), (5, 7), (256, 256), (512, 200), (768, 130), (300, 257), (2, 3, 5)],
    ids=str,
)
@pytest.mark.parametrize("numbers", [1, 2**22])  # at a time: a few rows, all together
def test_transposed(shape: tuple[int, ...], dtype: torch.dtype, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, large ones of many rows, whole batches; with gaps between the rows or within."""
    monkeypatch.setattr(matmul, "BLOCK_NUMBERS", numbers)
    turned = torch.randn(*shape[:-2], shape[-1], shape[-2]).mT
    for x in (torch.randn(*shape), torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2], turned):
        x = (100 * x).to(dtype)
        result = transposed(x)
        assert result.is_contiguous()
        assert torch.equal(result, x.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("experts", [2, 5])
def test_products(experts: int, dtype: torch.dtype) -> None:
    a = torch.randn(512, experts, 64, dtype=dtype).transpose(0, 1)
    b, bias = torch.randn(experts, 96, 64, dtype=dtype).transpose(1, 2), torch.randn(experts, 96, dtype=dtype)
    close(products(a, b, bias, relu=True), torch.baddbmm(bias[:, None], a, b).relu())


@pytest.mark.parametrize("variant", ["segments", "bags", "padded"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_variants(variant: str, counts: list[int], dtype: torch.dtype) -> None:
    rows, groups = sum(counts), len(counts)
    a, c = torch.randn(rows, 64, dtype=dtype), torch.randn(rows, 24, dtype=dtype)
    b, bias = torch.randn(groups, 32, 64, dtype=dtype).transpose(1, 2), torch.randn(groups, 32, dtype=dtype)
    split = list(zip(a.split(counts), c.split(counts), strict=True))
    expected = torch.cat([x @ b[e] + bias[e] for e, (x, _) in enumerate(split)])
    close(grouped_product(a, b, counts, bias, relu=True, variant=variant), expected.relu())
    close(grouped_product(a, b, counts, variant=variant), torch.cat([x @ b[e] for e, (x, _) in enumerate(split)]))
    close(grouped_outer(a, c, counts, variant=variant), torch.stack([x.t() @ y for x, y in split]))


def test_which_variant() -> None:
    rows = torch.randn(1024, 256)
    assert choose_variant(rows, 256, [64] * 16) == "segments"  # few and large
    assert choose_variant(rows, 256, [4] * 256) == "padded"  # many and small
    by_row = "bags" if "fbgemm" in torch.backends.quantized.supported_engines else "padded"
    assert choose_variant(rows, 256, [4] * 256, by_row=True) == by_row
    assert choose_variant(rows.double(), 256, [4] * 256, by_row=True) == "padded"
    assert choose_variant(rows, 256, [1024] + [0] * 255) == "segments"
    assert choose_variant(rows, 256, [32] * 32 + [0] * 200) == "segments"  # most groups empty: not to be computed


def test_no_groups_no_rows() -> None:
    assert grouped_product(torch.randn(0, 8), torch.randn(3, 8, 4), [0, 0, 0]).shape == (0, 4)
    assert torch.equal(grouped_outer(torch.randn(0, 8), torch.randn(0, 4), [0, 0, 0]), torch.zeros(3, 8, 4))


class Called(TorchDispatchMode):
    """Record the names of the operators that run in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not onednn_multiplies(torch.ones(1)), reason="torch's own product is as fast here")
@pytest.mark.filterwarnings("ignore:TF32")  # torch says so when it puts its flags back
def test_onednn_is_used_and_can_be_switched_off() -> None:
    a, b = torch.randn(512, 256), torch.randn(256, 256)
    with Called() as called:
        product(a, b)
        products(a[None], b[None])
        grouped_product(a, b[None], [512])
    assert called.names.count("mkldnn._linear_pointwise.default") == 3
    with torch.backends.mkldnn.flags(enabled=False), Called() as called:
        close(product(a, b), a @ b)
    assert "mkldnn._linear_pointwise.default" not in called.names
    with Called() as called:  # too small to gain anything
        product(a[:, :8], b[:8])
    assert "mkldnn._linear_pointwise.default" not in called.names


def test_half_precision_takes_torchs_product() -> None:
    a, b = torch.randn(512, 256).bfloat16(), torch.randn(256, 256).bfloat16()
    assert torch.equal(product(a, b), a @ b)


def test_rounded_row_counts_are_few_and_close() -> None:
    sizes = round_up(list(range(8193)))
    assert round_up(list(range(33))) == list(range(33))
    assert round_up([]) == []
    assert sizes[:33] == list(range(33))
    assert all(0 <= size - rows <= rows / 16 for rows, size in enumerate(sizes))
    assert len(set(sizes)) == 33 + 16 * 8


def test_an_infinite_row_stays_in_its_group() -> None:
    """Also where groups are padded: 0 times infinity between the rows of another would be NaN."""
    counts = [2, 3, 1]
    a, b = torch.randn(6, 4), torch.randn(6, 5)
    a[0, 0] = b[0, 0] = torch.inf
    assert grouped_outer(a, b, counts, "padded")[1:].isfinite().all()
    assert grouped_product(a, torch.randn(3, 4, 5), counts, variant="padded")[2:].isfinite().all()
