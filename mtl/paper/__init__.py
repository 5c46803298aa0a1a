"""Run a table or a figure of a publication again, and compare: ``python reproduce.py NAME``."""
