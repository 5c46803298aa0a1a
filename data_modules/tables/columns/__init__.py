"""One module for each kind of column: what is learnt about it, and how its cells become inputs."""
