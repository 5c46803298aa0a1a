"""The versions of other libraries that pyproject.toml accepts."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT

NEEDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
BOUNDS = {need.name: need.specifier for need in map(Requirement, NEEDS)}


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("pytorch-lightning", ["2.6.6"], ["2.6.2", "2.6.3", "2.6.5"]),  # malicious, or run code of a checkpoint
        ("lightning-fabric", ["2.6.6"], ["2.6.2", "2.6.3", "2.6.5"]),
        ("hydra-core", ["1.3.8"], ["1.3.3", "1.4.0"]),
        ("torch", ["2.13.0", "2.14.1"], ["2.12.1", "2.15.0"]),
        ("torchvision", ["0.28.0", "0.29.1"], ["0.27.0", "0.30.0"]),
    ],
)
def test_bounds_keep_out_what_must_not_be_installed(name: str, accepted: list[str], refused: list[str]) -> None:
    assert [version for version in accepted + refused if version in BOUNDS[name]] == accepted
