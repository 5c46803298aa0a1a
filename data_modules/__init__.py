"""LightningDataModules. They import `mtl.types`, `mtl.checks` and nothing else of the project."""

import mtl  # noqa: F401  (must come first: torchvision, and with it Lightning, cannot be imported without it)
