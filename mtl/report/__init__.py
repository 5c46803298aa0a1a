"""Compare runs: read their folders into one table, group them by what differs, and write tables and curves."""
