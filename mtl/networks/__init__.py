"""Networks: bottoms, heads, the multi-gate mixture of experts and its baselines."""
