"""Find the best answers of span tasks in their texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def best_spans(logits: Tensor, context: Tensor, max_answer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best span of each row, ``[B, 2]``, its score ``[B]``, and the score ``[B]`` of having no answer.

    ``logits [B, S, 2]`` are the logits s of the first and e of the last token. The best span (i, j) has the largest
    s_i + e_j among the spans of at most ``max_answer`` tokens from ``context[b, 0]`` to ``context[b, 1]``; its score is
    -inf if there is no such span. The score of having no answer is s_0 + e_0 (BERT, Devlin et al. 2019).
    """
    place = torch.arange(logits.shape[1], device=logits.device)
    first, last = context.to(logits.device).unbind(1)
    outside = (place < first[:, None]) | (place > last[:, None])  # [B, S]
    start, end = logits.masked_fill(outside[..., None], -torch.inf).unbind(-1)
    longest = min(max_answer, logits.shape[1])
    ends = F.pad(end, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)  # [B, S, longest]: e_i, e_(i+1), ...
    score, best = (start[..., None] + ends).flatten(1).max(1)
    spans = torch.stack([best // longest, best // longest + best % longest], 1)
    return spans, score, logits[:, 0].sum(-1)
