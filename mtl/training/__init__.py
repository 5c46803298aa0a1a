"""Train a network on several tasks: the LightningModule, losses, metrics, schedules."""

from mtl import compat

compat.prepare_imports()
