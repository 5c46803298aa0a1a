"""LightningDataModules; they import `mtl.types` and nothing else of the project."""
