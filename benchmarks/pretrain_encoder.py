"""Pretrain a small BERT by masked tokens on GLUE's training sentences, for experiments without the network.

python benchmarks/pretrain_encoder.py FOLDER [--layers 4] [--hidden 256] [--epochs 4] [--tasks rte mrpc ...] [--seed 0]

Trains a WordPiece vocabulary and an encoder on the training rows (not those held out for validation), and writes both
to FOLDER, which ``network.pretrained=FOLDER`` accepts. As in BERT (Devlin et al. 2019, section 3.1), 15 % of the tokens
are predicted; of these, 80 % are masked, 10 % replaced by random ones, 10 % kept. The sentences are those that the
downstream tasks train on, without their labels. Prints the loss on validation rows after each epoch. There is no
dropout here, which a training this short does better without; the weights are saved with BERT's own rate of 0.1, for
the tasks.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# isort: split
import torch
from mtl.data_modules.glue import GlueDataModule
from mtl.data_modules.texts.rows import RaggedRows
from torch import Tensor

SHARE, MASKED, RANDOM = 0.15, 0.8, 0.1
POOL = 50  # batches whose rows are sorted by length together


def joined(parts: list[RaggedRows]) -> RaggedRows:
    """Return the rows of several tasks as one; their labels are left out."""
    ends = torch.tensor([0, *(len(part.tokens) for part in parts)]).cumsum(0)
    offsets = [part.offsets[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
    boundary = torch.cat([part.boundary for part in parts])
    tokens = torch.cat([part.tokens for part in parts])
    return RaggedRows(tokens, torch.cat([*offsets, ends[-1:]]), boundary, {}, parts[0].pad)


def batches(rows: RaggedRows, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the row indices of each batch of an epoch; rows of a batch have similar lengths."""
    lengths, found = rows.lengths, []
    for pool in torch.randperm(len(rows), generator=generator).split(size * POOL):
        found += pool[lengths[pool].argsort()].split(size)
    for index in torch.randperm(len(found), generator=generator).tolist():
        yield found[index]


def masked(
    tokens: Tensor, special: Tensor, vocab: int, mask_id: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return ``tokens [B, S]`` with some replaced, and the labels ``[B, S]``: the original ids there, else -100."""
    draw = torch.rand(tokens.shape, generator=generator)
    chosen = (draw < SHARE) & ~torch.isin(tokens, special)
    labels = tokens.masked_fill(~chosen, -100)
    kind = draw / SHARE  # uniform in [0, 1) where chosen
    other = torch.randint(int(special.max()) + 1, vocab, tokens.shape, generator=generator)
    replaced = torch.where(chosen & (kind < MASKED), mask_id, tokens)
    return torch.where(chosen & (kind >= MASKED) & (kind < MASKED + RANDOM), other, replaced), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir", default=os.environ.get("MTL_DATA_DIR", "data"))
    parser.add_argument("--tasks", nargs="+", default=["rte", "mrpc", "stsb", "cola", "sst2"])
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--minutes", type=float, default=None, help="stop after this time; the rate still falls to 0")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    from transformers import BertConfig, BertForMaskedLM
    from transformers.utils import logging

    data = GlueDataModule(
        given.data_dir, given.tasks, vocabulary=given.vocabulary, download=False, batch_size=given.batch_size
    )
    data.setup()
    vocabulary = Path(data.encoder.source)
    train, val = (joined(list(data.tasks[split].values())) for split in ("train", "val"))
    special = torch.arange(5)  # [PAD] [UNK] [CLS] [SEP] [MASK]
    torch.manual_seed(given.seed)
    generator = torch.Generator().manual_seed(given.seed)
    config = BertConfig(
        vocab_size=data.encoder.vocab,
        hidden_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=max(1, given.hidden // 64),
        intermediate_size=4 * given.hidden,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    count = sum(parameter.numel() for parameter in model.bert.parameters())
    print(
        f"{count:,} parameters, {len(train):,} rows of {len(train.tokens):,} tokens, vocabulary {vocabulary}",
        flush=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), given.learning_rate, weight_decay=0.01, fused=True)
    steps = given.epochs * -(-len(train) // given.batch_size)
    step, started = 0, time.time()

    def loss_of(rows: Tensor, part: RaggedRows) -> Any:
        batch = part.select(rows).inputs
        changed, labels = masked(batch["tokens"], special, config.vocab_size, 4, generator)
        state = model.bert(changed, (batch["tokens"] != part.pad).long(), batch["segments"]).last_hidden_state
        chosen = labels != -100  # the head is as large as the encoder: apply it where it counts
        return torch.nn.functional.cross_entropy(model.cls(state[chosen]), labels[chosen])

    for epoch in range(given.epochs):
        model.train()
        for rows in batches(train, given.batch_size, generator):
            spent = (time.time() - started) / 60
            done = step / steps if given.minutes is None else max(step / steps, spent / given.minutes)
            if done >= 1:
                break
            rate = given.learning_rate * min((step + 1) / (0.05 * steps), 1.0) * (1 - done)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = loss_of(rows, train)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 200 == 0:
                print(
                    f"step {step}/{steps}: loss {loss.item():.3f}, {(time.time() - started) / 60:.1f} min", flush=True
                )
        model.eval()
        with torch.no_grad():
            losses = [loss_of(rows, val).item() for rows in batches(val, 256, torch.Generator().manual_seed(0))]
        mean = sum(losses) / len(losses)
        print(f"epoch {epoch + 1}: validation loss {mean:.3f}, perplexity {math.exp(mean):.1f}", flush=True)
    given.folder.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    model.bert.config.hidden_dropout_prob = model.bert.config.attention_probs_dropout_prob = 0.1
    model.bert.save_pretrained(given.folder)
    for file in vocabulary.iterdir():
        shutil.copy(file, given.folder)
    print(f"{given.folder}: {step} steps, {(time.time() - started) / 60:.1f} min, torch {torch.__version__}")


if __name__ == "__main__":
    main()
