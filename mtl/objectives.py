"""What a task minimises besides the usual loss of its kind, and on which scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mtl.checks import require

Loss = Literal["huber", "mae", "quantile", "poisson", "focal"]
LOSSES: dict[str, tuple[Loss, ...]] = {  # of each kind of task, besides the usual one
    "binary": ("focal",),
    "multiclass": ("focal",),
    "regression": ("huber", "mae", "quantile", "poisson"),
    "span": (),
}
OF_QUANTILES = ("pinball", "coverage")  # metrics of tasks with loss=quantile, besides those of their kind


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss of a task and its scale; ``mtl.training.losses`` has the equations.

    ``loss``: None is the cross-entropy of classes, or the squared error of a regression. ``delta``: where the Huber
    loss turns from squares to absolute values, in standard units. ``gamma``: how much the focal loss takes weight from
    rows that are predicted well. ``quantiles``: those that a task with ``loss="quantile"`` predicts, in ascending
    order; empty for other tasks. ``transform="log"``: the network predicts the logarithm of the label.
    ``smoothing``: the share of the label that is spread over all classes.
    """

    loss: Loss | None = None
    delta: float = 1.0
    gamma: float = 2.0
    quantiles: tuple[float, ...] = ()
    transform: Literal["log"] | None = None
    smoothing: float = 0.0

    @property
    def is_log(self) -> bool:
        """Whether the network predicts logarithms, which ``TaskSpec.unstandardize`` turns into values."""
        return self.transform == "log" or self.loss == "poisson"

    @property
    def middle(self) -> int:
        """The index of the quantile nearest to the median, which metrics of one prediction, such as mse, compare."""
        return min(range(len(self.quantiles)), key=lambda index: abs(self.quantiles[index] - 0.5))

    def check(self, location: str, kind: str) -> None:
        """Raise InputError, which begins with ``location``, if options conflict or do not suit ``kind``."""
        kinds = [name for name, losses in LOSSES.items() if self.loss in losses]
        fits = self.loss is None or kind in kinds
        require(fits, f"{location}: loss={self.loss} is for kind={' and '.join(kinds) or 'no task'}, not {kind}")
        require(bool(self.quantiles) == (self.loss == "quantile"), f"{location}: loss=quantile needs quantiles")
        fits = list(self.quantiles) == sorted({*self.quantiles}) and all(0 < level < 1 for level in self.quantiles)
        require(fits, f"{location}: quantiles={list(self.quantiles)}: must ascend between 0 and 1")
        fits = self.transform is None or kind == "regression"
        require(fits, f"{location}: transform={self.transform} is for kind=regression, not {kind}")
        twice = f"{location}: transform=log with loss=poisson: this loss predicts the logarithm already"
        require(self.transform is None or self.loss != "poisson", twice)
        fits = self.smoothing == 0 or (kind in ("binary", "multiclass") and self.loss is None)
        smoothed = f"{location}: smoothing={self.smoothing} is for the usual loss of classes"
        require(fits, f"{smoothed}, not for {self.loss or kind}")
