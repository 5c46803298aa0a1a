"""The commands, and what they alone need: help, messages, run folders, sweeps."""
