"""Train multi-task networks that learn what to share between tasks, and use them: ``mtl.load(CHECKPOINT)``.

``from mtl import MixtureOfExperts, CometGate`` imports parts for networks of your own. ``import mtl`` alone imports
neither these parts nor torch: each name is imported at its first use, so that the command line answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mtl import compat

compat.prepare_imports()
compat.shorten_spinning()

if TYPE_CHECKING:  # what type checkers and editors read; at run time ``__getattr__`` imports the same names
    from mtl.experts.base import Experts as Experts
    from mtl.experts.conv import StackedConv as StackedConv
    from mtl.experts.dense import StackedDense as StackedDense
    from mtl.experts.ffn import StackedFFN as StackedFFN
    from mtl.gates import CometGate as CometGate
    from mtl.gates import CosineGate as CosineGate
    from mtl.gates import DSelectKGate as DSelectKGate
    from mtl.gates import FixedGate as FixedGate
    from mtl.gates import Gate as Gate
    from mtl.gates import GumbelMatrixGate as GumbelMatrixGate
    from mtl.gates import GumbelSoftmaxGate as GumbelSoftmaxGate
    from mtl.gates import HashGate as HashGate
    from mtl.gates import Permutation as Permutation
    from mtl.gates import ReMoEGate as ReMoEGate
    from mtl.gates import SoftmaxGate as SoftmaxGate
    from mtl.gates import SoftmaxSelectorGate as SoftmaxSelectorGate
    from mtl.gates import TaskTop1Gate as TaskTop1Gate
    from mtl.gates import TopKGate as TopKGate
    from mtl.gates import update_adaptive_gates as update_adaptive_gates
    from mtl.networks.base import MultiTaskNetwork as MultiTaskNetwork
    from mtl.networks.mixture import MixtureOfExperts as MixtureOfExperts
    from mtl.python.estimator import MultiTaskModel as MultiTaskModel
    from mtl.python.fit import fit as fit
    from mtl.python.share import share as share
    from mtl.types import Routing as Routing
    from mtl.use.compare import compare as compare
    from mtl.use.trained import TrainedModel as TrainedModel
    from mtl.use.trained import load as load

__version__ = "0.1.0"
_NAMES = {  # by module
    "mtl.experts.base": "Experts",
    "mtl.experts.conv": "StackedConv",
    "mtl.experts.dense": "StackedDense",
    "mtl.experts.ffn": "StackedFFN",
    "mtl.networks.base": "MultiTaskNetwork",
    "mtl.networks.mixture": "MixtureOfExperts",
    "mtl.python.estimator": "MultiTaskModel",
    "mtl.python.fit": "fit",
    "mtl.python.share": "share",
    "mtl.types": "Routing",
    "mtl.use.compare": "compare",
    "mtl.use.trained": "TrainedModel load",
    "mtl.gates": "CometGate CosineGate DSelectKGate FixedGate Gate GumbelMatrixGate GumbelSoftmaxGate HashGate "
    "Permutation ReMoEGate SoftmaxGate SoftmaxSelectorGate TaskTop1Gate TopKGate update_adaptive_gates",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mtl' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
