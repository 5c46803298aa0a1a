"""What a run says and leaves: commands in messages, the console, signals, results, the line to its study."""
