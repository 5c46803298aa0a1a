"""A trained network in use: loaded, and the commands on a finished run."""
