"""Loggers of Lightning that a resumed run continues."""

from mtl import compat

compat.prepare_imports()
