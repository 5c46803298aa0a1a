"""What a run needs around training: build its objects, checkpoints, results, sweeps."""

from mtl import compat

compat.prepare_imports()
