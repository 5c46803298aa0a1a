"""Time training and inference of the MovieLens network, relative to separate modules in the same process.

python benchmarks/step.py [--rounds N] [--device cuda] [--precision bf16]. Random ids, Adam, 2.5 million weights.
LibMTL's networks are included if it is installed (pip install --no-deps LibMTL). "decided": a COMET gate whose trees
have converged to one leaf each, which gives two experts per sample and task. "roofline": the time of the unavoidable
matrix products (of all experts, or of those in use if zeros are skipped) at the speed of one large torch.mm, as a share
of the step's time. "undisturbed": the ratio of the first deciles instead of the medians.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from common import medians as medians_of
from common import options, peak, take_turns, undisturbed, write

# isort: split
import torch
from torch import Tensor, nn

from mtl.experts.dense import StackedDense
from mtl.gates import (
    CometGate,
    DSelectKGate,
    Gate,
    GumbelSoftmaxGate,
    HashGate,
    SoftmaxGate,
    SoftmaxSelectorGate,
    TaskTop1Gate,
    TopKGate,
)
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, Categorical, DataSpec, NetworkOutput, TaskSpec

USERS, ITEMS, EXPERTS, WIDTH = 6040, 3952, 16, 256
BASELINE = "separate modules"
SPEC = DataSpec(
    {"user": Categorical(USERS), "item": Categorical(ITEMS)},
    [TaskSpec("watch", "binary", weight=0.9), TaskSpec("rating", "regression", weight=0.1)],
)
GATES: dict[str, Callable[..., Gate]] = {
    "softmax": SoftmaxGate,
    "topk": TopKGate,
    "hash": partial(HashGate, input_name="user"),
    "dselect_k": partial(DSelectKGate, entropy_weight=0.01),
    "comet": partial(CometGate, entropy_weight=0.01),
    "softmax_selector": SoftmaxSelectorGate,
    "gumbel_softmax": GumbelSoftmaxGate,
    "task_top1": TaskTop1Gate,
}


def dense_layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.5))


class SeparateModules(nn.Module):
    """The same network in the usual style: a list of experts, torch's dropout, softmax gates."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 128), nn.Embedding(ITEMS, 128)
        self.experts = nn.ModuleList(dense_layer() for _ in range(EXPERTS))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in SPEC.tasks)
        self.heads = nn.ModuleList(nn.Sequential(dense_layer(), nn.Linear(WIDTH, 1)) for _ in SPEC.tasks)

    def forward(self, inputs: Mapping[str, Tensor], tasks: object = None) -> NetworkOutput:
        x = torch.cat([self.user(inputs["user"]), self.item(inputs["item"])], -1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)  # [B, E, H]
        mixed = [(gate(x).softmax(-1)[..., None] * outputs).sum(1) for gate in self.gates]
        heads = zip(SPEC.task_names, self.heads, mixed, strict=True)
        return NetworkOutput({name: head(value).squeeze(-1) for name, head, value in heads})


class Peer(nn.Module):
    """A network of LibMTL behind our embeddings."""

    def __init__(self, architecture: Any, **kwargs: Any) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 128), nn.Embedding(ITEMS, 128)
        heads = nn.ModuleDict({name: nn.Sequential(dense_layer(), nn.Linear(WIDTH, 1)) for name in SPEC.task_names})
        sizes = {"img_size": [WIDTH], "num_experts": [EXPERTS], **kwargs}
        self.body = architecture(SPEC.task_names, dense_layer, heads, False, False, torch.get_default_device(), **sizes)

    def forward(self, inputs: Mapping[str, Tensor], tasks: object = None) -> NetworkOutput:
        x = torch.cat([self.user(inputs["user"]), self.item(inputs["item"])], -1)
        return NetworkOutput({name: value.squeeze(-1) for name, value in self.body(x).items()})


def peer_module() -> ModuleType | None:
    """Return LibMTL's module of architectures, or None if it is not installed."""
    # LibMTL's residual networks, not used here, import a module that torchvision no longer has
    gone = SimpleNamespace(load_state_dict_from_url=torch.hub.load_state_dict_from_url)
    sys.modules.setdefault("torchvision.models.utils", cast(ModuleType, gone))
    try:
        return importlib.import_module("LibMTL.architecture")
    except ImportError:
        return None


def peers() -> dict[str, nn.Module]:
    """Return LibMTL's networks, or an empty dict if it is not installed."""
    theirs = peer_module()
    if theirs is None:
        return {}
    return {"LibMTL MMoE": Peer(theirs.MMoE), "LibMTL DSelect_k": Peer(theirs.DSelect_k, num_nonzeros=2, kgamma=1.0)}


def ours(gate: Callable[..., Gate], execution: str = "dense") -> MMoE:
    """Return our network, whose experts are executed as ``execution`` says from the first step on."""
    network = MMoE(
        SPEC,
        num_experts=EXPERTS,
        bottom=partial(TabularBottom, embedding_dim=128),
        experts=partial(StackedDense, units=[WIDTH], dropout=0.5),
        gate=gate,
        heads=partial(Heads, units=[WIDTH], dropout=0.5),
        execution=execution,
    )
    network.mixture.dispatch.sparse = execution != "dense"
    return network


def decided(execution: str) -> MMoE:
    """Return our network with a COMET gate in its state at the end of training."""
    network = ours(GATES["comet"], execution)
    with torch.no_grad():
        network.mixture.gate.split_weight.mul_(1e5)  # every split saturates: K experts per task
    return network


def ids(rows: int) -> dict[str, Tensor]:
    return {"user": torch.randint(USERS, (rows,)), "item": torch.randint(ITEMS, (rows,))}


def training(network: nn.Module, rows: int, fused: bool, half: bool = False) -> Callable[[], object]:
    """Return a function that does one training step on a random batch; ``half``: under autocast to bfloat16."""
    module = MultiTaskModule(network, SPEC.tasks, partial(torch.optim.Adam, lr=1e-4, fused=fused))
    module.log = lambda *args, **kwargs: None  # there is no trainer to log to
    optimizer = module.configure_optimizers()
    network.train()

    def step() -> None:
        targets = {"watch": torch.randint(2, (rows,)).float(), "rating": torch.rand(rows)}
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=half):
            loss = module.training_step(Batch(ids(rows), targets), 0)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def inference(network: nn.Module, rows: int, chunk: int | None) -> Callable[[], object]:
    """Return a function that predicts a random batch; ``chunk``: the number of rows per call (None: all)."""
    network.eval()

    def predict() -> None:
        inputs = ids(rows)
        with torch.no_grad():
            for start in range(0, rows, chunk or rows):
                network({name: value[start : start + (chunk or rows)] for name, value in inputs.items()})

    return predict


@torch.no_grad()
def needed(network: nn.Module, rows: int) -> float:
    """Return the FLOPs of the unavoidable matrix products of a training step."""
    experts = float(EXPERTS)
    if isinstance(network, MMoE) and network.mixture.dispatch.sparse:
        inputs = ids(4096)
        weights = network.mixture.gate(network.bottom(inputs), inputs).weights
        experts = float((weights != 0).any(-2).sum(-1).double().mean())
    tasks = len(SPEC.tasks)
    products = experts * WIDTH * WIDTH + tasks * (WIDTH * WIDTH + WIDTH)
    return 3 * 2 * rows * products  # forward, and backward to inputs and to weights


def main() -> None:
    given = options(
        __doc__,
        rounds=8,
        precision=(str, "32", "32, or bf16: training under autocast to bfloat16"),
        compiled=(int, 0, "1: also the softmax gate's network through torch.compile"),
    )
    others = peers()
    networks: dict[str, nn.Module] = {BASELINE: SeparateModules(), **others}
    networks |= {f"ours, {name}, dense": ours(gate) for name, gate in GATES.items()}
    networks |= {f"ours, {name}, sparse": ours(GATES[name], "sparse") for name in ("topk", "hash", "task_top1")}
    networks |= {f"ours, comet decided, {way}": decided(way) for way in ("dense", "sparse", "auto")}
    if given.compiled:
        networks["ours, softmax, dense, compiled"] = ours(GATES["softmax"])
        networks["ours, softmax, dense, compiled"].compile()
    mine = [name for name in networks if name.startswith("ours")]
    half = given.precision == "bf16"
    steps = {name: training(network, 512, name in mine, half) for name, network in networks.items()}
    speed = peak()
    train_times = take_turns(steps, given.rounds)
    train, train_best = medians_of(train_times), undisturbed(train_times)
    speed = max(speed, peak())
    small_times = take_turns({n: inference(m, 512, None) for n, m in networks.items()}, given.rounds)
    small, small_best = medians_of(small_times), undisturbed(small_times)
    large = {name: inference(network, 8192, None if name in mine else 512) for name, network in networks.items()}
    large_ms = medians_of(take_turns(large, max(2, given.rounds // 2), calls=3))
    rows = [
        {
            "network": name,
            "train 512, ms": train[name],
            "of separate": train[name] / train[BASELINE],
            "undisturbed": train_best[name] / train_best[BASELINE],
            "roofline": f"{needed(network, 512) / speed / (train[name] / 1000):.0%}",
            "predict 512, ms": small[name],
            "of separate ": small[name] / small[BASELINE],
            "undisturbed ": small_best[name] / small_best[BASELINE],
            "predict 8192, ms": large_ms[name],
            "of separate in chunks": large_ms[name] / large_ms[BASELINE],
        }
        for name, network in networks.items()
    ]
    notes = [f"A large matrix product runs at {speed / 1e9:.0f} GFLOP/s (torch.mm); training in {given.precision}."]
    notes += [] if others else ["LibMTL is not installed: its rows are left out."]
    write(given, "step", "A step of the MovieLens network", rows, notes)


if __name__ == "__main__":
    main()
