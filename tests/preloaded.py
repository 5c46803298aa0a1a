"""What programs need: the server of ``programs.py`` imports this once, so that those it forks start at once.

Nothing here may start a thread, which a fork would lose.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil

import mtl.callbacks
import mtl.data_modules

from tests.integration.helpers import composed

LATE = [  # functions import these
    *("matplotlib.backends.backend_agg", "matplotlib.pyplot", "scipy.optimize", "scipy.special", "scipy.stats"),
    *("torch.utils.tensorboard", "PIL.JpegImagePlugin"),
]
for name in LATE:
    importlib.import_module(name)
for package in (mtl, mtl.callbacks, mtl.data_modules):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
composed([])  # Hydra finds its plugins, and its parser learns the grammar
gc.freeze()  # the programs' garbage collectors leave all this alone
