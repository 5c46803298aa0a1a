"""Gates: one class per file, each holding the gates of all tasks."""

from mtl.gates.adaptive import update_adaptive_gates as update_adaptive_gates
from mtl.gates.base import Gate as Gate
from mtl.gates.comet import CometGate as CometGate
from mtl.gates.cosine import CosineGate as CosineGate
from mtl.gates.dselect_k import DSelectKGate as DSelectKGate
from mtl.gates.fixed import FixedGate as FixedGate
from mtl.gates.gumbel_matrix import GumbelMatrixGate as GumbelMatrixGate
from mtl.gates.gumbel_softmax import GumbelSoftmaxGate as GumbelSoftmaxGate
from mtl.gates.hash import HashGate as HashGate
from mtl.gates.permuted import Permutation as Permutation
from mtl.gates.permuted import PermutedGate as PermutedGate
from mtl.gates.remoe import ReMoEGate as ReMoEGate
from mtl.gates.softmax import SoftmaxGate as SoftmaxGate
from mtl.gates.softmax_selector import SoftmaxSelectorGate as SoftmaxSelectorGate
from mtl.gates.task_top1 import TaskTop1Gate as TaskTop1Gate
from mtl.gates.topk import TopKGate as TopKGate
