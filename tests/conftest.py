"""Shared by all tests: a fixed seed, no thread noise, and where golden and real files are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import mtl  # noqa: F401  (makes torchvision importable before Lightning is)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def golden_dir() -> Path:
    """The folder of golden vectors: $MTL_GOLDEN_DIR, else ../shared/golden beside the repository."""
    return Path(os.environ.get("MTL_GOLDEN_DIR", ROOT.parent / "shared" / "golden"))
