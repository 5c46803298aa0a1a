"""Studies: search the options of runs with Optuna, by any number of workers. The command is ``mtl tune``.

A trial is an ordinary run of ``mtl train`` in a separate process. Its number in the study determines its parameters,
training seed and folder, so a trial whose worker was killed continues as the same trial.
"""
