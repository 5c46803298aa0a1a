"""Train a network on several tasks: the LightningModule, losses, metrics, weightings and schedules."""
