"""Checkpoints of earlier versions; ``tests/integration/test_resume.py`` goes on from whole ones."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from mtl.experts.dense import StackedDense
from mtl.run.upgrade import upgrade
from mtl.training.module import MultiTaskModule
from mtl.types import TaskSpec


def turned(value: Any) -> Any:
    """Return a tensor ``[E, H, D]`` as earlier versions held it: in memory it lies as ``[E, D, H]``."""
    matrices = isinstance(value, torch.Tensor) and value.dim() == 3
    return value.transpose(1, 2).contiguous().transpose(1, 2) if matrices else value


def test_optimizer_state_in_another_memory_layout() -> None:
    """A fused optimizer goes through memory: state in another order would move other weights."""
    experts = StackedDense(40, 6, [7, 5])
    module = MultiTaskModule(experts, [TaskSpec("a", "regression")], partial(torch.optim.Adam, lr=0.1, fused=True))
    twin = copy.deepcopy(module)
    one, other = module.configure_optimizers(), twin.configure_optimizers()
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    one.step()
    old = copy.deepcopy(one.state_dict())
    for values in old["state"].values():
        values.update({name: turned(value) for name, value in values.items()})
    assert not old["state"][0]["exp_avg"].is_contiguous()
    checkpoint = {"config": {}, "state_dict": module.state_dict(), "optimizer_states": [old]}
    new = upgrade(checkpoint)
    twin.load_state_dict(new["state_dict"])
    other.load_state_dict(new["optimizer_states"][0])
    for parameter, like in zip(twin.parameters(), module.parameters(), strict=True):
        parameter.grad = like.grad.clone()
    one.step()
    other.step()
    for parameter, like in zip(twin.parameters(), module.parameters(), strict=True):
        assert parameter.is_contiguous()
        assert torch.equal(parameter, like)


def test_present_checkpoint_is_returned_as_it_is() -> None:
    checkpoint = {"format": 2, "config": {"fast": "auto"}, "state_dict": {"network.gate.bias": torch.zeros(1)}}
    assert upgrade(checkpoint) is checkpoint


def test_regressions_of_earlier_versions_are_not_standardised() -> None:
    tasks = {"stars": {"kind": "regression"}, "click": {"kind": "binary"}}
    old = {"format": 2, "config": {"data": {"tasks": tasks}}, "tasks": [{"name": "stars"}, {"name": "click"}]}
    new = upgrade(old)["config"]["data"]["tasks"]
    assert new == {"stars": {"kind": "regression", "standardise": False}, "click": {"kind": "binary"}}
    current = old | {"tasks": [{"name": "stars", "std": 2.0}]}
    assert upgrade(current) is current


def test_names_of_parameters_classes_and_schedules() -> None:
    old = {
        "network.experts.layers.0.weight": 0,
        "network.gate.bias": 1,
        "network.permutation.logits": 2,
        "network.gate_trunk.weight": 3,
        "network.dispatch._extra_state": 4,
        "network.heads.output.1.bias": 5,
    }
    callbacks = {
        "hardening": {"_target_": "callbacks.hardening.PermutationHardening", "target": "network.permutation"},
        "tau": {"_target_": "callbacks.scheduled_buffer.ScheduledBuffer", "target": "network.permutation.tau"},
        "entropy": {"_target_": "callbacks.scheduled_buffer.ScheduledBuffer", "target": "network.gate.entropy_weight"},
        "connections": {"_target_": "callbacks.connection_report.ConnectionReport"},
        "progress": {"_target_": "callbacks.progress_bar.ProgressBar"},
        "nothing": None,
    }
    config = {
        "callbacks": callbacks,
        "permutation": {"_target_": "mtl.permutation.Permutation"},
        "setting": {"experts": {"units": [5]}, "find_unused_parameters": True},
        "network": {"experts": "${setting.experts}"},
        "list": ["${setting.find_unused_parameters}"],
    }
    new = upgrade({"config": config, "state_dict": old})
    assert new["state_dict"] == {
        "network.mixture.experts.layers.0.weight": 0,
        "network.mixture.gate.gate.bias": 1,
        "network.mixture.gate.permutation.logits": 2,
        "network.mixture.trunk.weight": 3,
        "network.mixture.dispatch._extra_state": 4,
        "network.heads.output.1.bias": 5,
    }
    assert new["config"]["callbacks"] == {
        "hardening": {"_target_": "callbacks.hardening.PermutationHardening"},
        "tau": {"_target_": "callbacks.scheduled_buffer.ScheduledBuffer", "target": "network.*permutation.tau"},
        "entropy": {"_target_": "callbacks.scheduled_buffer.ScheduledBuffer", "target": "network.*gate.entropy_weight"},
        "progress": {"_target_": "callbacks.progress.Progress"},
        "nothing": None,
    }
    assert new["config"]["permutation"]["_target_"] == "mtl.gates.permuted.Permutation"
    assert new["config"]["experts"] == {"units": [5]}
    assert new["config"]["task_batches"] is True
    assert new["config"]["network"] == {"experts": {"units": [5]}}  # references are replaced by their values
    assert new["config"]["list"] == [True]
    assert new["config"]["fast"] == "auto"
    assert config["setting"]["experts"] == {"units": [5]}  # the caller's own is left alone


def test_interpolations_that_could_read_the_environment_stay_for_the_reader_to_refuse() -> None:
    config = {"label": "${oc.env:HOME}", "k": "${setting.k}", "setting": {"k": 1}}
    assert upgrade({"config": config, "state_dict": {}})["config"]["label"] == "${oc.env:HOME}"


def test_frozen_experts_and_their_logistic_units() -> None:
    old = {"network.expert_weight": 0, "network.head_scale": 1, "network.head_bias": 2, "network.gate.mix_bias": 3}
    assert set(upgrade({"config": {}, "state_dict": old})["state_dict"]) == {
        "network.mixture.experts.weight",
        "network.head.scale",
        "network.head.bias",
        "network.mixture.gate.mix_bias",
    }


def test_routed_networks_keep_their_names() -> None:
    old = {"network.layers.0.gate.logits": 0, "network.heads.heads.0.output.1.bias": 1}
    assert upgrade({"config": {}, "state_dict": old})["state_dict"] == old
