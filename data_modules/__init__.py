"""LightningDataModules. They import `mtl.types`, `mtl.checks` and nothing else of the project."""

from mtl import compat

compat.prepare_imports()
