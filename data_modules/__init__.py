"""LightningDataModules, which import only basic modules of ``mtl`` such as ``mtl.types`` and ``mtl.options``."""

from mtl import compat

compat.prepare_imports()
