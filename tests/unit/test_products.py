"""Every way to multiply gives what torch's plain product gives; which way is taken follows from the sizes."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mtl import compat, products
from mtl.functional import samples_first
from mtl.products import choose_variant, grouped_outer, grouped_product, product, rounded, transposed

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
@pytest.mark.parametrize("at_once", [1, 2**22])  # a few rows, all together
def test_transposed(shape: tuple[int, ...], dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, large ones of many rows, whole batches; with gaps between the rows or within."""
    monkeypatch.setattr(products, "AT_ONCE", at_once)
    turned = torch.randn(*shape[:-2], shape[-1], shape[-2]).mT
    for x in (torch.randn(*shape), torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2], turned):
        x = (100 * x).to(dtype)
        result = transposed(x)
        assert result.is_contiguous()
        assert torch.equal(result, x.mT)


def test_samples_first_and_back() -> None:
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    result = samples_first(x)
    assert torch.equal(result, x.permute(2, 0, 1))
    assert torch.autograd.gradcheck(samples_first, x)
    turned = torch.randn(3, 6, 4).transpose(0, 1), torch.randn(3, 4, 6).permute(2, 0, 1)
    for direction in (torch.randn(6, 3, 4), *turned):
        [gradient] = torch.autograd.grad(result, x, direction.double(), retain_graph=True)
        assert torch.equal(gradient, direction.permute(1, 2, 0).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("experts", [2, 5])
def test_products(experts: int, dtype: torch.dtype) -> None:
    a = torch.randn(512, experts, 64, dtype=dtype).transpose(0, 1)
    b, bias = torch.randn(experts, 96, 64, dtype=dtype).transpose(1, 2), torch.randn(experts, 96, dtype=dtype)
    close(products.products(a, b, bias, relu=True), torch.baddbmm(bias[:, None], a, b).relu())


@pytest.mark.parametrize("variant", ["segments", "bags", "padded", "grouped_mm"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_variants(variant: str, counts: list[int], dtype: torch.dtype) -> None:
    if variant == "grouped_mm" and dtype == torch.float64:
        pytest.skip("torch has no grouped_mm in float64, and it is never chosen there")
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


@pytest.mark.skipif(products._LINEAR is None, reason="torch's own product is as fast here")
@pytest.mark.filterwarnings("ignore:TF32")  # torch says so when it puts its flags back
def test_onednn_is_used_counted_and_can_be_switched_off() -> None:
    a, b = torch.randn(512, 256), torch.randn(256, 256)
    with FlopCounterMode(display=False) as counter:
        product(a, b)
    assert counter.get_total_flops() == 2 * 512 * 256 * 256
    assert "mkldnn._linear_pointwise" in str(counter.get_flop_counts()["Global"])
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        close(product(a, b), a @ b)
    assert "mkldnn._linear_pointwise" not in str(counter.get_flop_counts()["Global"])


def test_freed_memory_is_kept_and_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, since it cannot be taken back: how often the system had to clear a page."""
    program = """
import resource, sys, torch
from mtl import compat
if sys.argv[1] == "keep":
    compat.keep_freed_memory()
for number in range(60):
    if number == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**20 + number) for _ in range(12)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    runs = [[sys.executable, "-c", program, way] for way in ("keep", "default")]
    kept, default = (int(subprocess.run(run, check=True, capture_output=True, text=True).stdout) for run in runs)
    if platform.libc_ver()[0] == "glibc":
        assert kept < default / 2
    monkeypatch.setattr(compat.ctypes, "CDLL", lambda name: object())
    compat.keep_freed_memory()


def test_half_precision_takes_torchs_product() -> None:
    a, b = torch.randn(512, 256).bfloat16(), torch.randn(256, 256).bfloat16()
    assert torch.equal(product(a, b), a @ b)


def test_rounded_numbers_of_rows_are_few_and_close() -> None:
    sizes = rounded(list(range(8193)))
    assert rounded(list(range(33))) == list(range(33))
    assert rounded([]) == []
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
