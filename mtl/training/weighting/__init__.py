"""Combine the losses of tasks, or their gradients: one method a class, chosen by ``conf/weighting``."""

from mtl.training.weighting.base import FixedWeighting, TaskLosses, Weighting, shared_parameters
from mtl.training.weighting.famo import FAMO
from mtl.training.weighting.gradient import GradientWeighting
from mtl.training.weighting.gradnorm import GradNorm
from mtl.training.weighting.jacobian import JacobianWeighting
from mtl.training.weighting.loss import LossWeighting
from mtl.training.weighting.uw_so import SoftOptimalUncertainty

__all__ = [
    "FAMO",
    "FixedWeighting",
    "GradNorm",
    "GradientWeighting",
    "JacobianWeighting",
    "LossWeighting",
    "SoftOptimalUncertainty",
    "TaskLosses",
    "Weighting",
    "shared_parameters",
]
