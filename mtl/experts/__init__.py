"""Stacked experts: one parameter `[E, ...]` per layer and one batched operation for all experts."""
