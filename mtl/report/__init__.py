"""Compare runs: read their folders into one table, group them by the options that differ, write tables and curves."""
