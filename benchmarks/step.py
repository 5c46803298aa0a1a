"""Time training and inference of mixtures of experts, relative to separate modules in the same process.

python benchmarks/step.py [--rounds N] [--tables movielens,tasks,experts,weightings] [--device cuda] [--precision bf16].
Random ids, batches of 512, Adam. Tables: gates on the network of MovieLens (2.5 million weights); 128 tasks; 4 to 1024
experts of which each sample uses two (those that compute all experts end at 256); all weightings of two and of eight
tasks, relative to the plain sum. LibMTL's networks are included if it is
installed (``common.libmtl``). "decided": a COMET gate whose trees have converged to one leaf each, which gives two
experts per sample and task. Ratios are of medians; "undisturbed" of first deciles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from common import ROOT, Row, libmtl, medians, options, take_turns, undisturbed, write

# isort: split
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from mtl.checks import InputError
from mtl.experts.dense import StackedDense
from mtl.gates import CometGate, DSelectKGate, Gate, HashGate, SoftmaxGate, TopKGate
from mtl.networks.base import MultiTaskNetwork
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule
from mtl.training.weighting import Weighting
from mtl.types import Batch, Categorical, DataSpec, NetworkOutput, TaskSpec

USERS, ITEMS, ROWS = 6040, 3952, 512
BASELINE = "separate modules"
IDS = {"user": Categorical(USERS), "item": Categorical(ITEMS)}
SPEC = DataSpec(IDS, [TaskSpec("watch", "binary", weight=0.9), TaskSpec("rating", "regression", weight=0.1)])
GATES: dict[str, Callable[..., Gate]] = {
    "softmax": SoftmaxGate,
    "topk": TopKGate,
    "hash": partial(HashGate, input_name="user"),
    "dselect_k": partial(DSelectKGate, entropy_weight=0.01),
    "comet": partial(CometGate, entropy_weight=0.01),
}


@dataclass(frozen=True)
class Case:
    """The settings that all networks of a table share; ``width``: units of every layer."""

    spec: DataSpec = SPEC
    experts: int = 16
    width: int = 256

    def layer(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU(), nn.Dropout(0.5))

    def embeddings(self) -> nn.ModuleDict:
        sizes = {name: kind.size for name, kind in self.spec.inputs.items()}
        return nn.ModuleDict({name: nn.Embedding(size, self.width // 2) for name, size in sizes.items()})

    def heads(self) -> nn.ModuleDict:
        make = lambda: nn.Sequential(self.layer(), nn.Linear(self.width, 1))  # noqa: E731
        return nn.ModuleDict({name: make() for name in self.spec.task_names})


MOVIELENS = Case()
EIGHT_TASKS = Case(DataSpec(IDS, [TaskSpec(f"task{n}", "binary") for n in range(8)]))
MANY_TASKS = Case(DataSpec(IDS, [TaskSpec(f"task{n}", "regression") for n in range(128)]), width=32)


class SeparateModules(MultiTaskNetwork):
    """The same network in the usual style: a list of experts, torch's dropout, softmax gates."""

    def __init__(self, case: Case = MOVIELENS) -> None:
        super().__init__(case.spec)
        self.tables, self.heads = case.embeddings(), case.heads()
        self.experts = nn.ModuleList(case.layer() for _ in range(case.experts))
        self.gates = nn.ModuleList(nn.Linear(case.width, case.experts) for _ in case.spec.tasks)

    def forward(self, inputs: Mapping[str, Tensor], tasks: object = None) -> NetworkOutput:
        x = torch.cat([table(inputs[name]) for name, table in self.tables.items()], -1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)  # [B, E, H]
        mixed = [(gate(x).softmax(-1)[..., None] * outputs).sum(1) for gate in self.gates]
        heads = zip(self.heads.items(), mixed, strict=True)
        return NetworkOutput({name: head(value).squeeze(-1) for (name, head), value in heads})


class Peer(MultiTaskNetwork):
    """A network of LibMTL behind embeddings."""

    def __init__(self, architecture: Any, case: Case = MOVIELENS, **kwargs: Any) -> None:
        super().__init__(case.spec)
        self.tables, device = case.embeddings(), torch.get_default_device()
        sizes = {"img_size": [case.width], "num_experts": [case.experts], **kwargs}
        self.body = architecture(case.spec.task_names, case.layer, case.heads(), False, False, device, **sizes)

    def forward(self, inputs: Mapping[str, Tensor], tasks: object = None) -> NetworkOutput:
        x = torch.cat([table(inputs[name]) for name, table in self.tables.items()], -1)
        return NetworkOutput({name: value.squeeze(-1) for name, value in self.body(x).items()})


def peers(case: Case = MOVIELENS) -> dict[str, nn.Module]:
    """Return LibMTL's networks, none if it is not installed."""
    if (theirs := libmtl("architecture")) is None:
        return {}
    selected = Peer(theirs.DSelect_k, case, num_nonzeros=2, kgamma=1.0)
    return {"LibMTL MMoE": Peer(theirs.MMoE, case), "LibMTL DSelect_k": selected}


def ours(gate: Callable[..., Gate], execution: str = "dense", case: Case = MOVIELENS) -> MMoE:
    """Return our network, with the given ``execution`` of its experts from the first step on."""
    network = MMoE(
        case.spec,
        num_experts=case.experts,
        bottom=partial(TabularBottom, embedding_dim=case.width // 2),
        experts=partial(StackedDense, units=[case.width], dropout=0.5),
        gate=gate,
        heads=partial(Heads, units=[case.width], dropout=0.5),
        execution=execution,
    )
    network.mixture.dispatch.sparse = execution != "dense"
    return network


def decided(execution: str, case: Case = MOVIELENS) -> MMoE:
    """Return our network with a COMET gate in its state at the end of training."""
    network = ours(GATES["comet"], execution, case)
    with torch.no_grad():
        network.mixture.gate.split_weight.mul_(1e5)  # every split saturates: K experts per task
    return network


def ids(rows: int) -> dict[str, Tensor]:
    return {"user": torch.randint(USERS, (rows,)), "item": torch.randint(ITEMS, (rows,))}


def random_batch(spec: DataSpec, rows: int) -> Batch:
    targets = {
        t.name: torch.randint(2, (rows,)).float() if t.kind == "binary" else torch.rand(rows) for t in spec.tasks
    }
    return Batch(ids(rows), targets)


def training(
    network: nn.Module,
    spec: DataSpec = SPEC,
    fused: bool = True,
    precision: str = "32",
    weighting: Weighting | None = None,
) -> Callable[[], object]:
    """Return a function that does one training step on a random batch."""
    make = partial(torch.optim.Adam, lr=1e-4, fused=fused)
    module = MultiTaskModule(network, spec.tasks, make, weighting=weighting)
    module.log = lambda *args, **kwargs: None  # there is no trainer to log to
    optimizer = module.configure_optimizers()
    network.train()

    def step() -> None:
        batch = random_batch(spec, ROWS)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=precision == "bf16"):
            loss = module.training_step(batch, 0)["loss"]
        optimizer.zero_grad()
        loss.backward()
        module.weighting.before_step(0)
        optimizer.step()
        if module.weighting.needs_losses_after_step:
            with torch.no_grad():
                module.weighting.after_step([module.task_losses(module(batch.inputs), batch, count_in_epoch=False)])

    return step


def weightings(case: Case, rounds: int) -> list[Row]:
    """Return the time of a training step with each weighting, relative to the plain sum."""
    calls = {}
    for file in sorted((ROOT / "conf/weighting").glob("*.yaml")):
        options = OmegaConf.load(file)
        for at in ("parameters", "representation") if "grad_wrt" in options else ("",):
            chosen = OmegaConf.merge(options, {"grad_wrt": at} if at else {})
            network, tasks = ours(GATES["softmax"], case=case), len(case.spec.tasks)
            try:
                weighting = instantiate(chosen, _convert_="all")(network=network, num_tasks=tasks)
            except InputError:  # methods that need more tasks
                continue
            device = torch.get_default_device()
            name = f"{file.stem}, at the {at}" if at else file.stem
            calls[name] = training(network, case.spec, weighting=weighting.to(device))
    middle = medians(take_turns(calls, rounds))
    fixed = middle["fixed"]
    return [{"weighting": name, "ms": ms, "of fixed": ms / fixed} for name, ms in middle.items()]


def inference(network: nn.Module, rows: int, chunk: int) -> Callable[[], object]:
    """Return a function that predicts a random batch, ``chunk`` rows at a time."""
    network.eval()

    def predict() -> None:
        inputs = ids(rows)
        with torch.no_grad():
            for start in range(0, rows, chunk):
                network({name: value[start : start + chunk] for name, value in inputs.items()})

    return predict


def timed(networks: Mapping[str, nn.Module], case: Case, rounds: int, precision: str, large: int = 0) -> list[Row]:
    """Return a row for each network: times of a training step and of predictions of 512 and, if > 0, ``large`` rows.

    Separate modules predict many rows in chunks of 512: the outputs of all experts would not fit into the cache.
    """
    mine = {name for name in networks if name.startswith("ours")}
    rows: dict[str, Row] = {name: {"network": name} for name in networks}
    calls = {"train 512": {n: training(net, case.spec, n in mine, precision) for n, net in networks.items()}}
    calls["predict 512"] = {n: inference(net, ROWS, ROWS) for n, net in networks.items()}
    if large:
        sizes = {name: large if name in mine else ROWS for name in networks}
        calls[f"predict {large}"] = {n: inference(net, large, sizes[n]) for n, net in networks.items()}
    for name_of_pass, contenders in calls.items():
        for network in networks.values():
            network.train(name_of_pass.startswith("train"))
        seconds = take_turns(contenders, rounds)
        middle, best = medians(seconds), undisturbed(seconds)
        for name in networks:
            rows[name][f"{name_of_pass}, ms"] = middle[name]
            if BASELINE in networks:
                rows[name][f"{name_of_pass}, of separate"] = middle[name] / middle[BASELINE]
                rows[name][f"{name_of_pass}, undisturbed"] = best[name] / best[BASELINE]
    return list(rows.values())


def main() -> None:
    args = options(
        __doc__,
        rounds=8,
        precision=(str, "32", "32, or bf16: training under autocast to bfloat16"),
        tables=(str, "movielens,tasks,experts,weightings", "which tables, with commas"),
    )
    notes = [f"Training in {args.precision}."] + ([] if peers() else ["LibMTL is not installed: it is left out."])
    if "movielens" in args.tables:
        networks: dict[str, nn.Module] = {BASELINE: SeparateModules(), **peers()}
        networks |= {f"ours, {name}, dense": ours(gate) for name, gate in GATES.items()}
        networks |= {f"ours, {name}, sparse": ours(GATES[name], "sparse") for name in ("topk", "hash")}
        networks |= {f"ours, comet decided, {way}": decided(way) for way in ("dense", "sparse", "auto")}
        rows = timed(networks, MOVIELENS, args.rounds, args.precision, 8192)
        write(args, "step", "A step of the MovieLens network", rows, notes)
    if "tasks" in args.tables:
        networks = {BASELINE: SeparateModules(MANY_TASKS), **peers(MANY_TASKS)}
        networks |= {f"ours, {name}, dense": ours(GATES[name], case=MANY_TASKS) for name in ("softmax", "comet")}
        networks["ours, comet decided, sparse"] = decided("sparse", MANY_TASKS)
        rows = timed(networks, MANY_TASKS, args.rounds, args.precision)
        write(args, "step_tasks", "A step of a network with 128 tasks, 32 units wide", rows, notes)
    if "experts" in args.tables:
        rows = []
        for number in (4, 16, 64, 256, 1024):
            case, networks = Case(experts=number), {}
            if number <= 256:
                networks = {BASELINE: SeparateModules(case), "ours, topk, dense": ours(GATES["topk"], case=case)}
            networks["ours, topk, sparse"] = ours(GATES["topk"], "sparse", case)
            rows += [{"experts": number} | row for row in timed(networks, case, args.rounds, args.precision)]
        write(args, "step_experts", "Many experts, two per sample", rows, notes)
    if "weightings" in args.tables:
        for number, case in ((2, MOVIELENS), (8, EIGHT_TASKS)):
            title = f"A step with each weighting, {number} tasks"
            write(args, f"step_weightings_{number}", title, weightings(case, args.rounds), notes)


if __name__ == "__main__":
    main()
