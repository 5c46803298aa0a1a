"""Tell the parameters that tasks share from those of single tasks."""

from __future__ import annotations

from typing import Any

from torch import nn


def shared_parameters(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters that tasks share, and those that belong to single tasks.

    A module with a method ``task_parameters`` names the second kind: parameters of one task, and stacks ``[T, ...]``
    with a row for each. All others are shared.
    """
    listed: list[Any] = [getattr(module, "task_parameters", list)() for module in network.modules()]
    owned = {id(parameter) for parameters in listed for parameter in parameters}
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    shared = [parameter for parameter in trained if id(parameter) not in owned]
    return shared, [parameter for parameter in trained if id(parameter) in owned]
