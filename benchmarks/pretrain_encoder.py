"""Pretrain a small BERT by masked tokens on GLUE's training sentences, for experiments without a download.

python benchmarks/pretrain_encoder.py FOLDER [--layers 4] [--hidden 256] [--epochs 4] [--tasks rte mrpc ...] [--seed 0]

Trains a WordPiece vocabulary and an encoder on the training rows (not those held out for validation), and writes both
to FOLDER, which ``network.pretrained=FOLDER`` accepts. As in BERT (Devlin et al. 2019, section 3.1), 15 % of the tokens
are predicted; of these, 80 % are masked, 10 % replaced by random ones, 10 % kept. Prints the loss on validation rows
after each epoch. There is no dropout here, which a training this short does better without; the weights are saved with
BERT's own rate of 0.1, for the tasks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path

import common  # noqa: F401  (makes mtl importable)
import torch
from mtl.data_modules.glue import GlueDataModule
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

SHARE, MASKED, RANDOM = 0.15, 0.8, 0.1
MASK, SPECIAL = 4, 5  # the id of [MASK]; ids below SPECIAL are [PAD] [UNK] [CLS] [SEP] [MASK]


def masked(tokens: Tensor, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ``tokens [B, S]`` with some replaced, and the labels ``[B, S]``: the original ids there, else -100."""
    draw = torch.rand(tokens.shape, generator=generator)
    chosen = (draw < SHARE) & (tokens >= SPECIAL)
    kind = draw / SHARE  # uniform in [0, 1) where chosen
    other = torch.randint(SPECIAL, vocab, tokens.shape, generator=generator)
    replaced = torch.where(chosen & (kind < MASKED), MASK, tokens)
    replaced = torch.where(chosen & (kind >= MASKED) & (kind < MASKED + RANDOM), other, replaced)
    return replaced, tokens.masked_fill(~chosen, -100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir", default=os.environ.get("MTL_DATA_DIR", "data"))
    parser.add_argument("--tasks", nargs="+", default=["rte", "mrpc", "stsb", "cola", "sst2"])
    numbers = {"vocabulary": 8000, "layers": 4, "hidden": 256, "epochs": 4, "batch-size": 64, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    data = GlueDataModule(
        args.data_dir, args.tasks, vocabulary=args.vocabulary, download=False, batch_size=args.batch_size
    )
    data.setup()
    config = BertConfig(
        vocab_size=data.encoder.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        intermediate_size=4 * args.hidden,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=0.01, fused=True)
    steps = args.epochs * len(data.train_dataloader())
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.05 * steps), 1.0) * max(0.0, 1 - step / steps)
    )

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        changed, labels = masked(tokens, config.vocab_size, generator)
        state = model.bert(changed, (tokens != 0).long(), batch["segments"]).last_hidden_state
        chosen = labels != -100  # the head is as large as the encoder: apply it where it counts
        return torch.nn.functional.cross_entropy(model.cls(state[chosen]), labels[chosen])

    started = time.time()
    for epoch in range(args.epochs):
        model.train()
        for batch in data.train_dataloader():
            loss = loss_of(batch.inputs)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
        model.eval()
        with torch.no_grad():
            losses = [loss_of(batch.inputs).item() for batch in data.val_dataloader()]
        minutes = (time.time() - started) / 60
        print(f"epoch {epoch + 1}: validation loss {sum(losses) / len(losses):.3f}, {minutes:.1f} min", flush=True)
    model.bert.config.hidden_dropout_prob = model.bert.config.attention_probs_dropout_prob = 0.1
    model.bert.save_pretrained(args.folder)
    for file in Path(data.encoder.source).iterdir():
        shutil.copy(file, args.folder)


if __name__ == "__main__":
    main()
