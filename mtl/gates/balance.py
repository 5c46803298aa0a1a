"""Auxiliary losses that spread the samples over the experts; each averages over the batch and sums over tasks.

All take ``[B, T, E]``; a static gate is a batch of one. "Batch" means the batch of all processes together, so the
losses do not depend on the number of processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtl.distributed import batch_mean, batch_sum

_CV_EPS = 1e-10
_MIN_STDDEV = 1e-6  # softplus underflows to 0


def squared_variation(x: Tensor) -> Tensor:
    """Return the squared coefficient of variation over the last dimension, ``[..., E] -> [...]``."""
    return x.var(-1, unbiased=False) / (x.mean(-1).square() + _CV_EPS)


def importance_loss(weights: Tensor) -> Tensor:
    """Return CV^2 of the experts' summed weights (Shazeer et al. 2017, equations 6 and 7)."""
    return squared_variation(batch_sum(weights)).sum()


def load_loss(clean: Tensor, noisy: Tensor, stddev: Tensor, k: int) -> Tensor:
    """Return CV^2 of the experts' expected number of samples (Shazeer et al. 2017, equations 8 to 11).

    ``clean`` logits, ``noisy`` logits and the noise's ``stddev``, all ``[B, T, E]``; needs k < E. An expert is
    selected when its noisy logit exceeds the k-th largest of the others.
    """
    # The k-th largest of the *other* logits: for an expert among the k largest, this is the (k+1)-th largest of all
    largest = noisy.topk(k + 1, dim=-1).values  # [B, T, K+1]
    kth, next_ = largest[..., k - 1 : k], largest[..., k : k + 1]
    threshold = torch.where(noisy >= kth, next_, kth)
    probability = torch.special.ndtr((clean - threshold) / stddev.clamp(min=_MIN_STDDEV))
    return squared_variation(batch_sum(probability)).sum()


def balance_loss(probabilities: Tensor, selected: Tensor) -> Tensor:
    """Return E * sum_i f_i P_i, 1 when balanced (Switch Transformer: Fedus et al. 2022, equation 4).

    P: the mean of ``probabilities``; f: the share of all selections that expert i gets, from ``selected`` (1 where
    selected, else 0).
    """
    share = batch_sum(selected.to(probabilities.dtype))  # [T, E]
    share = share / share.sum(-1, keepdim=True)
    rows = batch_sum(probabilities.new_ones(len(probabilities)))
    return probabilities.shape[-1] * (share * batch_sum(probabilities) / rows).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean squared log-partition of the router (ST-MoE: Zoph et al. 2022, equation 5)."""
    return batch_mean(logits.logsumexp(-1).square().sum(-1))
