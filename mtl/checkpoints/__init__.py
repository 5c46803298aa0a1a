"""Write and read checkpoints, and start a run from the checkpoint of another."""
