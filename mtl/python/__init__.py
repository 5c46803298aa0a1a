"""The way in from Python: ``mtl.fit``."""
