"""Train multi-task networks that learn what to share between tasks, and use them: ``mtl.load(CHECKPOINT)``.

``from mtl import MixtureOfExperts, CometGate`` imports parts for networks of your own. ``import mtl`` alone imports
neither these parts nor torch: each name is imported at its first use, so that the command line answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors read; at run time ``__getattr__`` imports the same names
    from mtl.experts.base import Experts
    from mtl.experts.conv import StackedConv
    from mtl.experts.dense import StackedDense
    from mtl.experts.ffn import StackedFFN
    from mtl.gates import (
        CometGate,
        CosineGate,
        DSelectKGate,
        FixedGate,
        Gate,
        GumbelMatrixGate,
        GumbelSoftmaxGate,
        HashGate,
        Permutation,
        ReMoEGate,
        SoftmaxGate,
        SoftmaxSelectorGate,
        TaskTop1Gate,
        TopKGate,
        adapt_gates,
    )
    from mtl.networks.mixture import MixtureOfExperts
    from mtl.python.estimator import MultiTaskModel
    from mtl.python.fit import fit
    from mtl.python.share import share
    from mtl.types import Routing
    from mtl.use.trained import TrainedModel, load

__version__ = "0.1.0"
__all__ = [
    "CometGate",
    "CosineGate",
    "DSelectKGate",
    "Experts",
    "FixedGate",
    "Gate",
    "GumbelMatrixGate",
    "GumbelSoftmaxGate",
    "HashGate",
    "MixtureOfExperts",
    "MultiTaskModel",
    "Permutation",
    "ReMoEGate",
    "Routing",
    "SoftmaxGate",
    "SoftmaxSelectorGate",
    "StackedConv",
    "StackedDense",
    "StackedFFN",
    "TaskTop1Gate",
    "TopKGate",
    "TrainedModel",
    "adapt_gates",
    "fit",
    "load",
    "share",
]
_MODULES = {  # the modules of names that are not in mtl.gates
    "Experts": "mtl.experts.base",
    "MixtureOfExperts": "mtl.networks.mixture",
    "MultiTaskModel": "mtl.python.estimator",
    "Routing": "mtl.types",
    "StackedConv": "mtl.experts.conv",
    "StackedDense": "mtl.experts.dense",
    "StackedFFN": "mtl.experts.ffn",
    "TrainedModel": "mtl.use.trained",
    "fit": "mtl.python.fit",
    "load": "mtl.use.trained",
    "share": "mtl.python.share",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mtl' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "mtl.gates")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
