"""Gates: one class per file, each holding the gates of all tasks."""

from mtl.gates.adaptive import update_adaptive_gates
from mtl.gates.base import Gate
from mtl.gates.comet import CometGate
from mtl.gates.cosine import CosineGate
from mtl.gates.dselect_k import DSelectKGate
from mtl.gates.fixed import FixedGate
from mtl.gates.gumbel_matrix import GumbelMatrixGate
from mtl.gates.gumbel_softmax import GumbelSoftmaxGate
from mtl.gates.hash import HashGate
from mtl.gates.permuted import Permutation, PermutedGate
from mtl.gates.remoe import ReMoEGate
from mtl.gates.softmax import SoftmaxGate
from mtl.gates.softmax_selector import SoftmaxSelectorGate
from mtl.gates.task_top1 import TaskTop1Gate
from mtl.gates.topk import TopKGate

__all__ = [
    "CometGate",
    "CosineGate",
    "DSelectKGate",
    "FixedGate",
    "Gate",
    "GumbelMatrixGate",
    "GumbelSoftmaxGate",
    "HashGate",
    "Permutation",
    "PermutedGate",
    "ReMoEGate",
    "SoftmaxGate",
    "SoftmaxSelectorGate",
    "TaskTop1Gate",
    "TopKGate",
    "update_adaptive_gates",
]
