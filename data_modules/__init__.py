"""LightningDataModules; they import `mtl.types` and nothing else of the project."""

import mtl  # noqa: F401  (first: it makes torchvision, and with it Lightning, importable)
