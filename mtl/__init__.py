"""Train multi-task networks that learn what to share between tasks, and use them: ``mtl.load(CHECKPOINT)``.

``from mtl import MixtureOfExperts, CometGate`` imports parts for networks of your own. A name of ``EXPORTS`` is
imported when it is first used: ``import mtl`` alone imports none of them.
"""

import importlib
from typing import Any

from mtl import compat

EXPORTS = {  # name -> its module
    "MixtureOfExperts": "mtl.networks.mixture",
    "CometGate": "mtl.gates",
    "DSelectKGate": "mtl.gates",
    "FixedGate": "mtl.gates",
    "Gate": "mtl.gates",
    "GumbelMatrixGate": "mtl.gates",
    "GumbelSoftmaxGate": "mtl.gates",
    "HashGate": "mtl.gates",
    "Permutation": "mtl.gates",
    "SoftmaxGate": "mtl.gates",
    "SoftmaxSelectorGate": "mtl.gates",
    "TaskTop1Gate": "mtl.gates",
    "TopKGate": "mtl.gates",
    "Experts": "mtl.experts.base",
    "StackedConv": "mtl.experts.conv",
    "StackedDense": "mtl.experts.dense",
    "StackedFFN": "mtl.experts.ffn",
    "Routing": "mtl.types",
    "TrainedModel": "mtl.trained",
    "load": "mtl.trained",
}

compat.register_missing_operators()


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module 'mtl' has no attribute {name!r}")
    return getattr(importlib.import_module(EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *EXPORTS])
