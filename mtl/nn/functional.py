"""Functions and a base class that gates, experts and losses share: plain torch, finite at extreme arguments."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

ENTROPY_EPS = 1e-6  # inside the logarithm of the entropy, as in the reference implementations
LOG_EPS = 1e-8  # inside COMET's log(v), as in the reference implementation


def has_float64(device: torch.device) -> bool:
    """Return whether tensors on ``device`` may be float64; on Apple's GPUs (mps) they may not."""
    return device.type != "mps"


def float64_if_supported(x: Tensor) -> Tensor:
    """Return ``x`` in float64, or in float32 on a device without float64."""
    return x.double() if has_float64(x.device) else x.float()


def in_float64(x: Tensor) -> Tensor:
    """Return ``x`` in float64, on the CPU if its device has no float64."""
    return x.double() if has_float64(x.device) else x.cpu().double()


def sigmoid_keeping_ties(logits: Tensor) -> Tensor:
    """Return the sigmoids of ``logits`` in float64: equal logits have equal ones, so that metrics know their ties.

    ``torch.sigmoid`` gives the last numbers of a tensor, which do not fill its vector instructions, another last bit.
    """
    return 1 / (1 + torch.exp(-logits.double()))


def smooth_step(t: Tensor, gamma: float) -> Tensor:
    """Return S(t): 0 below -gamma/2, 1 above gamma/2, a cubic between (COMET, equation 9).

    S(t) = -2 t^3 / gamma^3 + 3 t / (2 gamma) + 1/2 inside, computed as s^2 (3 - 2s) with s = t / gamma + 1/2, which
    keeps its relative precision near 0: COMET takes the logarithm. Where S is flat, also at +-gamma/2 themselves,
    its value is exactly 0 or 1 and its gradient exactly 0. For the same reason compute 1 - S(t) as S(-t).
    """
    s = (t / gamma).clamp(-0.5, 0.5) + 0.5
    return s * s * (3.0 - 2.0 * s)


def entropy(p: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Return the sum over ``dim`` of -p log(p + 1e-6), in nats; value and gradient are finite at p = 0."""
    return (-p * torch.log(p + ENTROPY_EPS)).sum(dim)


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32 if it is narrower; float32 and float64 stay as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class KeepsBufferPrecision(nn.Module):
    """Base of modules whose buffers count or anneal: no buffer is converted to a type of fewer bits.

    A trainer of precision bf16-true or 16-true converts the whole network: 257 would become 256, and a temperature
    would not reach its value. Parameters are converted as usual.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        device = fn(torch.zeros(())).device
        trained = {id(tensor) for parameter in self.parameters() for tensor in (parameter, parameter.grad)}

        def converted(tensor: Tensor) -> Tensor:
            if tensor.dtype == torch.float64 and not has_float64(device):
                tensor = tensor.float()
            result: Tensor = fn(tensor)
            narrowed = result.dtype.itemsize < tensor.dtype.itemsize and id(tensor) not in trained
            return tensor.to(result.device) if narrowed else result

        super()._apply(converted, recurse)  # type: ignore[no-untyped-call]  # torch declares no types for it
        return self


def logistic_noise(like: Tensor) -> Tensor:
    """Draw standard logistic noise, the difference of two Gumbel variables, in the shape of ``like``."""
    uniform = torch.rand_like(like)
    tiny = torch.finfo(uniform.dtype).tiny
    uniform = uniform.clamp(tiny, 1.0 - torch.finfo(uniform.dtype).eps)  # rand can return exactly 0
    return uniform.log() - torch.log1p(-uniform)
