"""Types that data, networks, training and callbacks exchange.

Shape letters used throughout: B batch, T tasks, E experts, K selections, D features.
"""

from mtl.types.batch import Batch
from mtl.types.inputs import ROW, Bag, Categorical, Image, InputSpec, Numeric, RowEncoder, Tokens
from mtl.types.metrics import KINDS, METRICS, RANKING, TOP, TaskKind, check_metrics, metric_family
from mtl.types.outputs import Exportable, NetworkOutput, OwnsTaskParameters, Prunable, Routing, sum_losses
from mtl.types.task_tensors import TaskTensors
from mtl.types.tasks import MISSING_CLASS, DataSpec, Scorer, TaskSpec, has_label, standardize

__all__ = [
    "KINDS",
    "METRICS",
    "MISSING_CLASS",
    "RANKING",
    "ROW",
    "TOP",
    "Bag",
    "Batch",
    "Categorical",
    "DataSpec",
    "Exportable",
    "Image",
    "InputSpec",
    "NetworkOutput",
    "Numeric",
    "OwnsTaskParameters",
    "Prunable",
    "Routing",
    "RowEncoder",
    "Scorer",
    "TaskKind",
    "TaskSpec",
    "TaskTensors",
    "Tokens",
    "check_metrics",
    "has_label",
    "metric_family",
    "standardize",
    "sum_losses",
]
