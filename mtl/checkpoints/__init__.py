"""Checkpoints: how they are written and read, and what a run takes from the checkpoint of another."""

from mtl import compat

compat.prepare_imports()
