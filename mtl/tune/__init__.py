"""Studies: search the options of runs with Optuna, by any number of workers. The command is ``tune.py``.

A trial is an ordinary run of ``train.py`` in a process of its own. Its number in the study decides its parameters and
its training seed, and names its folder, so that a trial whose worker was killed goes on as the same trial.
"""
