"""Use a trained network: load it, predict, export, prune and serve it."""
