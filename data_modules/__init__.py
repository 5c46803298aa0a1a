"""LightningDataModules, which import only basic modules of ``mtl`` such as ``mtl.types`` and ``mtl.options``."""
