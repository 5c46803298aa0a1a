"""A run from its configuration to its results: own a folder, train, test, write, and say what can be done next."""
