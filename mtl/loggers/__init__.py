"""Loggers of Lightning that a resumed run continues."""
