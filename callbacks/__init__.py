"""Lightning callbacks: checkpoints, schedules, guards and reports."""

from mtl import compat

compat.prepare_imports()
