"""The configuration of a run: check it, build objects from it, and compose it again from a checkpoint."""
