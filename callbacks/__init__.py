"""Lightning callbacks."""

from mtl import compat

compat.prepare_imports()
