"""The way in from Python: ``mtl.fit``."""

from mtl import compat

compat.prepare_imports()
