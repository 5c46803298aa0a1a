"""The files of a run and the texts in them: read safely, written completely or not at all."""
