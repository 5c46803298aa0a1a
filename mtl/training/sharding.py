"""Divide a network among processes: large embedding tables by rows, all other parameters by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from mtl.checkpoints.shards import SHARDED, delete_unused_shards, joined, read_shards, write_shards
from mtl.distributed import local_shard
from mtl.gates.base import Gate
from mtl.networks.base import MultiTaskNetwork
from mtl.options import Count, validated


class ShardedStrategy(ModelParallelStrategy):
    """Each of N processes keeps 1/N of the parameters, gradients and states of the optimiser, and 1/N of each batch.

    ``split_rows``: embedding tables with at least so many rows are divided by rows and never put together: each process
    looks up the ids of all processes in its rows. The other parameters are whole in a step and in an evaluation.
    Each process saves its part for ``last.ckpt``; other checkpoints are one file, as those of any run. Each process
    takes its part from either, so that a run may go on with another number of processes.
    """

    @validated
    def __init__(self, split_rows: Count = 10_000) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)
        self.split_rows = split_rows

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # as with the other strategies, so that callbacks see the same order

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    lightning_module_state_dict = Strategy.lightning_module_state_dict
    optimizer_state = Strategy.optimizer_state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a file of each process and one that names them, or only one unless ``storage_options`` is ``SHARDED``.

        Every process must call this. Process 0 joins the tensors from the files, so that no device needs a whole one.
        """
        path = Path(filepath)
        if self.is_global_zero:
            delete_unused_shards(path.parent)
        rest = write_shards(checkpoint, path, self.global_rank)
        if self.is_global_zero and storage_options == SHARDED:
            self.checkpoint_io.save_checkpoint(rest, path)
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(joined(read_shards(rest, path)), path)
            delete_unused_shards(path.parent)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        io: Any = self.checkpoint_io  # ours
        content: dict[str, Any] = io.load_checkpoint(checkpoint_path, sharded=True)
        return content

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        current = self.lightning_module.state_dict()
        parts = {name: local_shard(value, current.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(parts, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            parameter_of = dict(zip(numbers, parameters, strict=True))
            parts = {
                number: {name: local_shard(value, parameter_of[number]) for name, value in values.items()}
                for number, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": parts})

    def shard_parameters(self) -> None:
        """Divide the parameters of the module, unless that has been done for an earlier stage."""
        module: Any = self.lightning_module
        if not self._units():
            shard(module.network, module.weighting, self.device_mesh["data_parallel"], self.split_rows)

    @contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """Make the parameters, but for split tables, ordinary tensors; every process must call this."""
        self.unshard_all()
        try:
            yield
        finally:
            self.reshard_all()

    def unshard_all(self) -> None:
        """Make all units whole until ``reshard_all``, even if processes differ in their numbers of forward passes."""
        for unit in self._units():
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def reshard_all(self) -> None:
        """Free what ``unshard_all`` has gathered."""
        module: Any = self.lightning_module
        for unit in self._units():
            unit.reshard()
            unit.set_reshard_after_forward(unit not in (module.network, module.weighting), recurse=False)

    def _units(self) -> list[FSDPModule]:
        assert self.lightning_module is not None
        return [part for part in self.lightning_module.modules() if isinstance(part, FSDPModule)]

    on_validation_start = on_test_start = on_predict_start = unshard_all
    on_validation_end = on_test_end = on_predict_end = reshard_all


def shard(network: MultiTaskNetwork, weighting: nn.Module, mesh: DeviceMesh, split_rows: int) -> None:
    """Divide ``network`` and ``weighting`` among the processes of ``mesh``; see ``ShardedStrategy``.

    Large tables of the network's ``bottom`` are divided by rows. FSDP's units are the network's ``fsdp_units``
    (unless Gumbel-Matrix gates have a budget), the rest of the network, and ``weighting``. A unit's gradients are
    divided as soon as they are complete.
    """
    parts = [] if network.bottom is None else network.bottom.modules()
    tables: list[Any] = [table for table in parts if type(table) is nn.Embedding]
    tables = [table for table in tables if table.padding_idx is None and table.num_embeddings >= split_rows]
    for table in tables:
        rows = distribute_tensor(table.weight.detach(), mesh, [Shard(0)])
        table.weight = nn.Parameter(rows, requires_grad=table.weight.requires_grad)
        table.forward = partial(_lookup, table, mesh)
    for part in (network, weighting):
        part.to(mesh.device_type)
        for value in (*part.parameters(), *part.buffers()):
            if not isinstance(value, DTensor):
                dist.broadcast(value.detach(), 0)  # equal in all processes, as with DDP
    split = {table.weight for table in tables}
    # The budget of Gumbel-Matrix gates reads the gates of all layers, so these must be whole together
    budgeted = any(part.budgeted for part in network.modules() if isinstance(part, Gate))
    for layer in () if budgeted else network.fsdp_units():
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh, ignored_params=split)
    if any(True for _ in weighting.parameters()):
        fully_shard(weighting, mesh=mesh)


def _lookup(table: nn.Embedding, mesh: DeviceMesh, ids: Tensor) -> Tensor:
    """Return the rows ``[..., D]`` of this process's ``ids [...]``; all processes look up together."""
    longest = torch.tensor(ids.numel(), device=ids.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    padded = F.pad(ids.flatten(), (0, int(longest) - ids.numel()))
    everyone: Any = DTensor.from_local(padded, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    # DTensor's own lookup makes the gradient of the table whole in each process
    weight: Any = table.weight
    part: Tensor = weight.to_local()  # [ceil(rows / N) or fewer, D]
    part = part if len(part) else F.pad(part, (0, 0, 0, 1))  # the last of many processes may have no row to look up
    index = everyone.to_local() - mesh.get_local_rank() * -(-table.num_embeddings // mesh.size())
    local = F.embedding(index.clamp(0, len(part) - 1), part) * ((index >= 0) & (index < len(part)))[:, None]
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient / mesh.size())  # FSDP averages over processes, too
    # A row is 0 in all processes but one, so the sum is the row; each process takes those of its ids
    rows: Tensor = DTensor.from_local(local, mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()
    return rows[: ids.numel()].view(*ids.shape, table.embedding_dim)
