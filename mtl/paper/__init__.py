"""Run a table or a figure of a publication again, and compare: ``mtl reproduce NAME``."""
