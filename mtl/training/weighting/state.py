"""Save the state of TorchJD's methods, most of which is in plain attributes that are not part of a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

INTERNAL = frozenset(vars(nn.Module()))
PLAIN = (bool, int, float, str, Tensor, np.ndarray, torch.dtype, torch.device)


def attributes(method: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes and buffers of each module of ``method`` that are plain data, by the module's name.

    Arrays become tensors. Other attributes, such as the problem that a solver has set up, are left out.
    """
    by_module: dict[str, dict[str, Any]] = {}
    for name, module in method.named_modules():
        values = {key: value for key, value in vars(module).items() if key not in INTERNAL} | dict(module._buffers)
        by_module[name] = {key: _copied(value) for key, value in values.items() if _is_plain(value)}
    return by_module


def set_attributes(method: nn.Module, saved: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
    """Restore the attributes of the modules of ``method`` that ``attributes`` returned.

    Tensors go to ``device``, but stay where they are if the present one is on the CPU.
    """
    modules = dict(method.named_modules())
    for name, values in saved.items():
        for key, value in values.items():
            now = getattr(modules[name], key, None)
            if isinstance(now, np.ndarray):
                value = value.cpu().numpy().copy()
            elif not isinstance(now, Tensor) or now.device != torch.device("cpu"):
                value = _copied(value, device)
            setattr(modules[name], key, value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, PLAIN)


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """Return a copy with tensors on ``device`` (None: where they are), and arrays as tensors."""
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, device) for item in value)
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
