"""What a run needs around training: build its objects, checkpoints, results, sweeps."""
