"""Train multi-task networks that learn what to share between tasks."""

from mtl import compat

compat.register_missing_operators()
