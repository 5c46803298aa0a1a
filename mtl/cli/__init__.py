"""The command line: composing a configuration, run folders, signals, messages, results, sweeps."""
