"""Analyse what a trained network shares between tasks."""
