"""Answer which tasks should share a network, by training them alone, together and in groups: ``mtl share``."""
