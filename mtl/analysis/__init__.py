"""Say what a trained network shares between tasks."""
