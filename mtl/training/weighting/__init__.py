"""Combine the losses of tasks, or their gradients: one method a class, chosen by ``conf/weighting``."""

from mtl.training.weighting.base import FixedWeighting as FixedWeighting
from mtl.training.weighting.base import TaskLosses as TaskLosses
from mtl.training.weighting.base import Weighting as Weighting
from mtl.training.weighting.base import shared_parameters as shared_parameters
from mtl.training.weighting.famo import FAMO as FAMO
from mtl.training.weighting.gradient import GradientWeighting as GradientWeighting
from mtl.training.weighting.gradnorm import GradNorm as GradNorm
from mtl.training.weighting.jacobian import JacobianWeighting as JacobianWeighting
from mtl.training.weighting.loss import LossWeighting as LossWeighting
from mtl.training.weighting.uw_so import SoftOptimalUncertainty as SoftOptimalUncertainty
