"""The configuration of a run: what may stand in it, what is built from it, what a checkpoint says of it."""

from mtl import compat

compat.prepare_imports()
