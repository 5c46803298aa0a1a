"""Studies: search the options of runs with Optuna, by any number of workers. The command is ``mtl tune``.

A trial is an ordinary run of ``mtl train`` in a separate process, see ``mtl.jobs``.
"""
