"""Fixtures of all tests: a fixed seed, and small data sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mtl  # noqa: F401  (makes torchvision importable before Lightning is)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with small files of every data set that has any."""
    from tests.tiny_data import write_tiny_data  # most tests need neither the files nor what writes them

    return write_tiny_data(tmp_path_factory.mktemp("data") / "sets")
