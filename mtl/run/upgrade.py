"""Convert a checkpoint that an earlier version of this program wrote to the current format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from mtl.checks import InputError
from mtl.run.trust import leaves

# Old and new paths of the classes that configurations name
MOVED = {
    "mtl.permutation.Permutation": "mtl.gates.permuted.Permutation",
    "mtl.sweep.SweepTable": "mtl.run.sweep.SweepTable",
    "mtl.console.ConsoleHandler": "mtl.run.console.ConsoleHandler",
    "callbacks.progress_bar.ProgressBar": "callbacks.progress.Progress",
    "pytorch_lightning.callbacks.RichProgressBar": "callbacks.progress.Progress",
    "pytorch_lightning.callbacks.ModelCheckpoint": "callbacks.best_checkpoint.BestCheckpoint",
    "pytorch_lightning.callbacks.EarlyStopping": "callbacks.early_stopping.EarlyStop",
    "pytorch_lightning.loggers.CSVLogger": "mtl.run.csv_log.CSVLog",
}
# Options of callbacks that no longer exist
DROPPED = {
    "callbacks.hardening.PermutationHardening": ("target",),  # permutations are found by type
    "callbacks.progress.Progress": ("refresh_rate",),  # once in refreshes per second
    "callbacks.best_checkpoint.BestCheckpoint": ("filename", "enable_version_counter", "save_on_train_epoch_end"),
    "callbacks.early_stopping.EarlyStop": ("strict", "check_on_train_epoch_end"),
}
REMOVED = {"callbacks.connection_report.ConnectionReport"}  # callbacks whose work another one does now
# Old and new names of configuration keys; references to them change as well
RENAMED = {"setting.experts": "experts", "setting.find_unused_parameters": "task_batches"}
# A reference to another value of the configuration
REFERENCE = re.compile(r"\$\{(?:[A-Za-z_]\w*(?:\.\w+)*|oc\.select:[\w.]+,[\w.+-]+)\}")
# Old names of scheduled buffers, and the patterns that match them now
TARGETS = (("network.permutation.", "network.*permutation."), ("network.gate.", "network.*gate."))


def upgrade(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return ``checkpoint`` with current class paths and parameter names; unchanged if it is current."""
    checkpoint = _without_logger(_with_raw_labels(checkpoint))
    if "format" in checkpoint:
        return checkpoint
    config, state = checkpoint["config"], checkpoint["state_dict"]
    engine_is_current = "fast" in config
    config = _with_new_names(config) | {"fast": config.get("fast", "auto")}
    config["callbacks"] = {name: _callback(node) for name, node in config.get("callbacks", {}).items() if _kept(node)}
    if engine_is_current:
        return checkpoint | {"config": settled(config)}
    state = {_parameter(name, state): value for name, value in state.items()}
    checkpoint = checkpoint | {"config": settled(config), "state_dict": state}
    if "callbacks" in checkpoint:
        checkpoint["callbacks"] = _callback_states(dict(checkpoint["callbacks"]))
    for optimizer in checkpoint.get("optimizer_states", []):
        # Stacked weights, and so their optimiser states, used to have a non-contiguous memory layout
        for values in optimizer["state"].values():
            values.update({name: value.contiguous() for name, value in values.items() if isinstance(value, Tensor)})
    return checkpoint


def _without_logger(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return ``checkpoint`` without its section ``logger`` if it is that of a single one; ``choices`` names it.

    Earlier versions had one logger, which was the whole section.
    """
    config = checkpoint["config"]
    if not isinstance(config.get("logger"), Mapping) or "_target_" not in config["logger"]:
        return checkpoint
    return checkpoint | {"config": {name: value for name, value in config.items() if name != "logger"}}


def _with_raw_labels(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return ``checkpoint`` with ``standardise=false`` for each regression of a user's data, if it is from before that.

    Earlier versions predicted the labels of a table as they are, and did not save a task's standard deviation.
    """
    config = checkpoint["config"]
    tasks = (config.get("data") or {}).get("tasks")
    if not isinstance(tasks, Mapping) or any("std" in task for task in checkpoint.get("tasks", [])):
        return checkpoint
    raw = {name for name, task in tasks.items() if isinstance(task, Mapping) and task.get("kind") == "regression"}
    if not raw:
        return checkpoint
    tasks = {name: {**task, "standardise": False} if name in raw else task for name, task in tasks.items()}
    return checkpoint | {"config": {**config, "data": {**config["data"], "tasks": tasks}}}


def settled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with its references to other values replaced by these values.

    Earlier versions stored references. Only plain ones (``${setting.k}``) are replaced; any other interpolation, which
    could read the environment, is left where it is, and ``mtl.run.trust`` refuses the checkpoint.
    """
    config = {**config, "paths": {"data_dir": "data", "output_dir": "outputs", "run_dir": "."}}  # never used
    texts = [value for _, value in leaves(config) if isinstance(value, str)]
    if any("${" in REFERENCE.sub("", text) for text in texts):
        return config
    try:
        result = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    except OmegaConfBaseException as error:
        raise InputError(f"the configuration in the checkpoint cannot be read: {str(error).splitlines()[0]}") from None
    assert isinstance(result, dict)
    return {str(key): value for key, value in result.items()}


def _with_new_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with current keys, references and class paths."""
    config = {**config, "setting": {"convolutions": [], **config.get("setting", {})}}
    words = dict(MOVED)
    for old, new in RENAMED.items():
        key = old.removeprefix("setting.")
        if key in config["setting"]:
            config[new] = config["setting"].pop(key)
            words[f"${{{old}}}"] = f"${{{new}}}"
    renamed: dict[str, Any] = _replaced(config, words)
    return renamed


def _replaced(node: Any, words: Mapping[str, str]) -> Any:
    """Return nested dicts and lists with every string that is a key of ``words`` replaced by its value."""
    if isinstance(node, dict):
        return {key: _replaced(child, words) for key, child in node.items()}
    if isinstance(node, list):
        return [_replaced(child, words) for child in node]
    return words.get(node, node) if isinstance(node, str) else node


def _kept(node: Any) -> bool:
    return not (isinstance(node, dict) and node.get("_target_") in REMOVED)


def _callback(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    node = dict(node)
    for option in DROPPED.get(str(node.get("_target_", "")), ()):
        node.pop(option, None)
    for old, new in TARGETS:
        if str(node.get("target", "")).startswith(old):
            node["target"] = node["target"].replace(old, new, 1)
    return node


def _callback_states(states: dict[str, Any]) -> dict[str, Any]:
    """Return the states of callbacks, with the two reports on routing as one."""
    shares = states.get("RoutingMonitor", {"steps": [], "shares": [], "binary_since": -1})
    looks = states.pop("ConnectionReport", {"steps": [], "probabilities": []})
    values: dict[str, list[Tensor]] = {}
    for look in looks["probabilities"]:
        for index, probabilities in enumerate(look):
            values.setdefault(f"layers.{index}", []).append(probabilities)
    states["RoutingMonitor"] = {
        "histories": {"mixture": dict(shares)} if shares["steps"] else {},
        "probabilities": {"steps": list(looks["steps"]), "values": values},
    }
    return states


def _parameter(name: str, state: dict[str, Any]) -> str:
    """Return the current name of a network's parameter or buffer."""
    permuted = "network.permutation.logits" in state
    mixture = "network.dispatch._extra_state" in state or "network.expert_weight" in state
    if not mixture:
        return name
    name = name.replace("network.expert_weight", "network.mixture.experts.weight")
    name = name.replace("network.head_", "network.head.")  # the logistic units of frozen experts
    name = name.replace("network.gate_trunk.", "network.mixture.trunk.")
    name = re.sub(r"^network\.(experts|dispatch)\.", r"network.mixture.\1.", name)
    name = re.sub(r"^network\.gate\.", "network.mixture.gate.gate." if permuted else "network.mixture.gate.", name)
    return re.sub(r"^network\.permutation\.", "network.mixture.gate.permutation.", name)
