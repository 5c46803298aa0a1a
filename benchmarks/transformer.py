"""Compare our Transformer, dense and with a mixture of four experts, to `transformers`' BERT in the same process.

python benchmarks/transformer.py [--rounds N] [--layers 4] [--hidden 256] [--rows 32] [--device cuda] [--precision P].
The mixture is top-1 of four experts of the dense layer's width: the same FLOPs per token. COMET's gates are those of
the end of a training, with one expert for each token. ``naive`` is `transformers`' BERT whose feed-forward layers are a
loop over the same four experts with boolean masks. All start from the same weights. Batches: without padding, and with
the lengths of GLUE rows that are bucketed by length or drawn at random. Forward passes are in evaluation mode, training
is forward and backward; AdamW's step, which depends on the number of parameters alone, is timed by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from common import Row, options, take_turns, undisturbed, write

# isort: split
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from mtl.experts.ffn import StackedFFN
from mtl.gates import CometGate, TaskTop1Gate
from mtl.networks.heads import Heads
from mtl.networks.transformer import Transformer
from mtl.types import DataSpec, TaskSpec, Tokens

VOCAB, EXPERTS, LONGEST = 8000, 4, 64
Batch = dict[str, Tensor]


class NaiveMixture(nn.Module):
    """Top-1 of four copies of a BERT layer's feed-forward part, as a loop over experts with boolean masks."""

    def __init__(self, layer: Any, hidden: int) -> None:
        super().__init__()
        part = nn.Sequential(layer.intermediate, layer.output.dense)
        self.experts = nn.ModuleList(copy.deepcopy(part) for _ in range(EXPERTS))
        self.gate = nn.Linear(hidden, EXPERTS, bias=False)
        nn.init.normal_(self.gate.weight, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        value, best = self.gate(x).softmax(-1).max(-1)  # [B, S]
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = best == index
            mixed[chosen] = (value[chosen][:, None] * expert(x[chosen])).to(mixed.dtype)
        return mixed


class AddAndNorm(nn.Module):
    """The end of a BERT layer, without the product that the experts contain."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.norm, self.dropout = output.LayerNorm, output.dropout

    def forward(self, mixed: Tensor, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.dropout(mixed) + x)
        return result


def naive(model: Any, hidden: int) -> Any:
    """Return a copy of a BERT whose feed-forward parts are naive mixtures."""
    changed = BertModel(model.config, add_pooling_layer=False)
    changed.load_state_dict(model.state_dict())
    for layer in changed.encoder.layer:
        layer.intermediate, layer.output = NaiveMixture(layer, hidden), AddAndNorm(layer.output)
    return changed


def batch(kind: str, rows: int) -> Batch:
    """Return a batch without padding, or with lengths as in a bucketed or a random batch of GLUE."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        if kind == "no padding":
            lengths = torch.full((rows,), LONGEST)
        elif kind == "bucketed":
            lengths = torch.randint(LONGEST - 5, LONGEST + 1, (rows,), generator=generator)
        else:
            lengths = (torch.rand(rows, generator=generator).pow(2) * (LONGEST - 6)).long() + 6
        lengths[0] = LONGEST
        ids = torch.randint(5, VOCAB, (rows, LONGEST), generator=generator)
        tokens = ids * (torch.arange(LONGEST) < lengths[:, None])
    device = torch.get_default_device()
    return {"tokens": tokens.to(device), "segments": torch.zeros_like(tokens, device=device)}


def theirs(model: Any) -> Callable[[Batch], Tensor]:
    return lambda inputs: model(inputs["tokens"], (inputs["tokens"] != 0).long(), inputs["segments"]).last_hidden_state


def ours(model: Any) -> Callable[[Batch], Tensor]:
    return lambda inputs: model(inputs, ["task"]).hidden[-1]


def main() -> None:
    args = options(
        __doc__,
        6,
        layers=(int, 4, "layers of the encoder"),
        hidden=(int, 256, "size of the hidden states"),
        rows=(int, 32, "rows of a batch"),
        precision=(str, "32", "32, or bf16: under autocast to bfloat16"),
    )
    config = {
        "vocab_size": VOCAB,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64,
        "intermediate_size": 4 * args.hidden,
    }
    spec = DataSpec({"tokens": Tokens(VOCAB, LONGEST), "segments": Tokens(2, LONGEST)}, [TaskSpec("task", "binary")])
    build = partial(Transformer, spec, EXPERTS, StackedFFN, heads=Heads, config=config, dropout=0.1, execution="sparse")
    bert = BertModel(BertConfig(**config), add_pooling_layer=False)
    top1, comet = partial(TaskTop1Gate, bias=False, initial_std=0.05), partial(CometGate, k=1, gamma=1e-3)
    models: dict[str, Any] = {
        "transformers": bert,
        "dense": build(gate=top1, mixture_layers=[]),
        "top-1 of 4": build(gate=top1),
        "COMET of 4": build(gate=comet),
        "naive top-1 of 4": naive(bert, args.hidden),
    }
    with torch.no_grad():
        for name, parameter in models["COMET of 4"].named_parameters():
            if name.endswith("split_weight"):
                parameter.mul_(1e5)  # every split saturates: one expert for each token
    calls = {name: (theirs if isinstance(model, BertModel) else ours)(model) for name, model in models.items()}
    half = partial(torch.autocast, torch.get_default_device().type, torch.bfloat16, args.precision == "bf16")
    rows: list[Row] = []
    for kind in ("no padding", "bucketed", "random lengths"):
        inputs = batch(kind, args.rows)
        real = int((inputs["tokens"] != 0).sum())

        def train(name: str, inputs: Batch = inputs) -> None:
            with half():
                loss = calls[name](inputs).square().mean()
            loss.backward()
            models[name].zero_grad()

        def forward(name: str, inputs: Batch = inputs) -> None:
            with torch.no_grad(), half():
                calls[name](inputs)

        for pass_name, run in (("training", train), ("forward", forward)):
            for model in models.values():
                model.train(pass_name == "training")
            ms = undisturbed(take_turns({name: partial(run, name) for name in models}, args.rounds, 4))
            for name, value in ms.items():
                ratios = {"of transformers": value / ms["transformers"], "tokens/s": 1000 * real / value}
                rows.append({"batch": kind, "pass": pass_name, "model": name, "ms": value} | ratios)
    steps = {}
    for name, model in models.items():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        steps[name] = torch.optim.AdamW(model.parameters(), fused=True).step
    for name, value in undisturbed(take_turns(steps, args.rounds)).items():
        rows.append({"batch": "any", "pass": "AdamW", "model": name, "ms": value})
    title = f"Transformer of {args.layers} layers, {args.hidden} wide, {args.rows} rows of up to {LONGEST} tokens"
    notes = [f"In {args.precision}.", "Times are first deciles: other jobs disturb these least."]
    write(args, "transformer", title, rows, notes)


if __name__ == "__main__":
    main()
