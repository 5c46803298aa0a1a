"""Tiny Transformers and batches of tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtl.experts.ffn import StackedFFN
from mtl.networks.heads import Heads
from mtl.networks.transformer import Transformer
from mtl.types import DataSpec, TaskSpec, Tokens

VOCAB, LENGTH = 40, 12
CONFIG = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TASKS = (TaskSpec("a", "binary"), TaskSpec("b.c", "multiclass", 3), TaskSpec("type", "regression"))
SPEC = DataSpec({"tokens": Tokens(VOCAB, LENGTH), "segments": Tokens(2, LENGTH)}, TASKS)


def transformer(
    gate: Any, seed: int = 0, spec: DataSpec = SPEC, width: int | None = None, **options: Any
) -> Transformer:
    """Return a tiny network in float64 with ``options`` of ``Transformer``, ``own_norm`` and ``expert_dropout``."""
    own = {name: options.pop(name) for name in ("own_norm", "expert_dropout") if name in options}
    experts = partial(
        StackedFFN, width=width, dropout=own.get("expert_dropout", 0.0), own_norm=own.get("own_norm", False)
    )
    defaults: dict[str, Any] = {"num_experts": 4, "dropout": 0.0, "experts": experts, "heads": Heads}
    if "pretrained" not in options:
        defaults["config"] = CONFIG
    torch.manual_seed(seed)
    return Transformer(spec, gate=gate, **(defaults | options)).double()


def tokens(lengths: list[int] | None = None, padded: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch of rows of the given ``lengths``, with ``padded`` places more than the longest needs."""
    lengths = lengths or [9, 4, 7, 1]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths) + padded, dtype=torch.int64)
    segments = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(1, VOCAB, (length,), generator=generator)
        segments[row, length // 2 : length] = 1
    return {"tokens": ids, "segments": segments}


def save_encoder(folder: Path, kind: str) -> Any:
    """Write a random encoder of `transformers` to ``folder``, and return it in float64, without dropout."""
    import transformers

    torch.manual_seed(5)
    sizes = CONFIG | {"vocab_size": VOCAB, "intermediate_size": 64, "max_position_embeddings": 20}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "bert":
        model: Any = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False)
    else:
        model = transformers.ElectraModel(transformers.ElectraConfig(**sizes, embedding_size=8))
    with torch.no_grad():  # layer norms and biases start at 1 and 0, which would hide mistakes
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.double().eval()


def save_vocabulary(folder: Path) -> Path:
    """Write a vocabulary of special tokens and letters into ``folder``, which data.tokenizer then accepts."""
    letters = [chr(ord("a") + n) for n in range(26)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(tokens[:VOCAB]) + "\n")
    return folder


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(
            value, second[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def shake(network: nn.Module) -> None:
    """Move all weights, so that experts differ and gates decide."""
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
