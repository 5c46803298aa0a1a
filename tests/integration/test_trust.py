"""A checkpoint may come from a stranger: what its configuration names must not run, and what is damaged is refused."""

from __future__ import annotations

import copy
import importlib
import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils._pytree import tree_flatten

from mtl.checkpoints.files import CheckpointIO, previous_checkpoint, read, read_to_resume
from mtl.checkpoints.trust import check_config, installed_targets
from mtl.checks import InputError
from mtl.config.portable import NAME_KEYS, is_portable
from mtl.config.resume import config_to_load
from mtl.files.run_files import flatten
from mtl.pipeline.run import run
from mtl.use.prune import prune_run
from mtl.use.trained import load
from tests.integration.helpers import compose_small, resume_small

CONSUMERS: dict[str, Callable[[Path, Path], object]] = {
    "ckpt": lambda path, folder: resume_small(path, folder),
    "evaluate": lambda path, folder: resume_small(path, folder, evaluate=True),
    "load": lambda path, folder: load(path),
    "prune": lambda path, folder: prune_run(path, [], folder / "pruned"),
}
EXPLOITS: list[tuple[str, Any]] = [
    ("data.seed", {"_target_": "torch.utils.collect_env.run", "command": "touch {0}"}),
    ("gate.k", {"_target_": "asyncio.create_subprocess_shell", "cmd": "touch {0}"}),
    ("network.heads", {"_target_": "torch.hub.load", "repo_or_dir": "{0}", "model": "x", "source": "local"}),
    ("experts.units", {"_target_": "pathlib.Path.write_text", "_args_": [{"_target_": "pathlib.Path"}, "x"]}),
    ("seed", {"_target_": "shutil.copyfile", "src": "/etc/hostname", "dst": "{0}"}),
    ("data", {"_target_": "mtl.data_modules.files.download.fetch", "url": "http://127.0.0.1:9/x", "dest": "{0}"}),
    ("data.rows", [{"_target_": "os.system", "command": "touch {0}"}, 1, 1]),
    ("gate._target_", "os.system"),
    ("gate._target_", {"_target_": "os.system", "command": "touch {0}"}),
    ("gate._target_", ["os.system"]),
    ("gate._target_", None),
    ("run_name", "${{oc.env:HOME}}"),
    ("data.base_url", "http://127.0.0.1:9/${{oc.env:HOME}}"),
    ("data", {"_target_": "pytorch_lightning.loggers.CSVLogger", "save_dir": "{0}"}),
    ("data.seed", {"_target_": "mtl.gates.CometGate"}),
]


def changed(config: Any, key: str, value: Any, target: object = "") -> Any:
    """Return a copy of ``config`` with ``value`` at ``key``; ``{0}`` in its texts becomes ``target``."""

    def filled(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: filled(child) for name, child in node.items()}
        if isinstance(node, list):
            return [filled(child) for child in node]
        return node.format(target) if isinstance(node, str) else node

    config = copy.deepcopy(config)
    *parents, last = key.split(".")
    node = config
    for name in parents:
        node = node.setdefault(name, {})
    node[last] = filled(value)
    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trust")
    words = ["network.static_gate=true", "gate=topk", "trainer.max_epochs=2", "data.batch_size=300"]
    run(compose_small(folder, *words))
    return folder / "checkpoints" / "last.ckpt"


def saved_with(whole: Path, folder: Path, **changes: Any) -> Path:
    """Write the checkpoint ``whole`` with other content, as a stranger could."""
    path = folder / "strange.ckpt"
    CheckpointIO().save_checkpoint(read(whole) | changes, path)
    return path


@pytest.mark.parametrize(("key", "value"), EXPLOITS, ids=str)
def test_stranger_runs_nothing(key: str, value: Any, whole: Path, tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    path = saved_with(whole, tmp_path, config=changed(read(whole)["config"], key, value, sentinel))
    for name, consumer in CONSUMERS.items():
        with pytest.raises(InputError, match=r"trust=\[|interpolation|lacks"):
            consumer(path, tmp_path / name)
        assert not (tmp_path / name).exists()
    assert not sentinel.exists()


WORDS = [
    *("gate=../../../tmp/evil", "gate=/tmp/evil", "+experiment=../evil", "logger=[csv,../evil]"),
    *("gate._target_=os.system", "optimizer._target_=os.system", "+a.b._args_=[x]", "+gate.x={y: '???'}"),
    *("+callbacks.mine={_target_: logging.FileHandler, filename: x}", "+data.rows=[{_target_: os.system, command: x}]"),
    *("callbacks.best.dirpath=/elsewhere", "logger.csv.save_dir=/elsewhere", "trainer.profiler=advanced", "trust=[os]"),
    *("paths.run_dir=/elsewhere", "hydra.run.dir=/elsewhere", "hydra.searchpath=[file:///tmp]", "data.data_dir=/else"),
    *(
        "data.base_url=http://127.0.0.1:9",
        "run_name=${oc.env:HOME}",
        "seed=${oc.decode:1}",
        "ckpt=x.ckpt",
        "evaluate=x",
    ),
    *("on_data_change=accept", "no word", "=", 5, None),
]


@pytest.mark.parametrize("word", WORDS, ids=str)
def test_words_of_a_stranger_are_refused(word: Any, whole: Path, tmp_path: Path) -> None:
    path = saved_with(whole, tmp_path, config=read(whole)["config"] | {"overrides": ["seed=0", word]})
    for evaluate in (False, True):
        with pytest.raises(InputError, match=r"holds the override|interpolation"):
            resume_small(path, tmp_path / "new", evaluate=evaluate)


def test_harmless_words_are_kept(whole: Path, tmp_path: Path) -> None:
    words = ["seed=3", "gate=topk", "logger=[csv,tensorboard]", "experiment=a/b-c", "recipe.patience=7", "~logger.csv"]
    words += ["callbacks.best.monitor=val/average", "trainer.devices=2", "optimizer._target_=torch.optim.RAdam"]
    words += ["run_name=two words", "start_from='/a/b.ckpt'", "data.path=/a/b.csv", "+data.tasks.x={kind: binary}"]
    assert [word for word in words if not is_portable(word)] == []
    config = read(whole)["config"]
    config = config | {"overrides": [*config["overrides"], "recipe.patience=7"]}
    cfg = resume_small(saved_with(whole, tmp_path, config=config), tmp_path / "new")
    assert cfg.recipe.patience == cfg.callbacks.early_stopping.patience == 7
    assert cfg.callbacks.best.dirpath == f"{tmp_path}/new/checkpoints"


def test_no_text_of_a_stranger_names_a_file_a_server_or_a_class(whole: Path, tmp_path: Path) -> None:
    """Whatever stands in the sections from which nothing is built, and in further options and objects there."""
    config, expected = read(whole)["config"], resume_small(whole, tmp_path / "new")
    for key, value in flatten({name: config[name] for name in ("callbacks", "logger", "trainer", "paths")}).items():
        if isinstance(value, str | None) and key.rpartition(".")[2] not in (*NAME_KEYS, "progress"):  # null: no bar
            config = changed(config, key, "/elsewhere")
    for section in ("callbacks", "logger", "callbacks.best", "trainer"):
        config = changed(config, f"{section}.more", {"_target_": "logging.FileHandler", "filename": "/elsewhere"})
        config = changed(config, f"{section}._partial_", True)
    for name in ("ckpt", "evaluate", "trust", "on_data_change", "hydra"):
        config = changed(config, name, "/elsewhere")
    for name in ("data.data_dir", "data.base_url", "data.other_url"):
        config = changed(config, name, "/elsewhere")
    cfg = resume_small(saved_with(whole, tmp_path, config=config), tmp_path / "new")
    assert cfg == OmegaConf.merge(expected, {"ckpt": cfg.ckpt})


def callables() -> list[str]:
    """Return the dotted names of many functions and classes of the standard library, torch, numpy and scipy."""
    modules = (
        "os os.path shutil subprocess pathlib tempfile logging logging.handlers runpy socket urllib.request pickle "
        "marshal ctypes importlib builtins code types torch torch.hub torch.utils.cpp_extension torch.serialization "
        "torch.jit torch.nn torch.package torch.distributed numpy numpy.lib.npyio scipy.io scipy.sparse hydra.utils "
        "mtl.use.prune mtl.checkpoints.files train mtl.data_modules.files.download pytorch_lightning omegaconf"
    )
    names = []
    for module in modules.split():
        content = vars(importlib.import_module(module))
        names += [f"{module}.{name}" for name, value in content.items() if callable(value) and name[:2] != "__"]
    return names


def test_random_callables_in_random_places_are_refused(whole: Path) -> None:
    config = read(whole)["config"]
    allowed = set().union(*installed_targets().values())
    names = [name for name in callables() if name not in allowed]
    assert len(names) > 1500
    draw = random.Random(0)
    places = (
        "data.seed gate gate.k network.heads network.bottom.x experts optimizer label seed recipe.expert_units "
        "permutation data.tasks network.experts.units new.section compile"
    )
    for name in draw.sample(names, 1000):
        value: Any = {"_target_": name, "_args_": ["x"]}
        value = draw.choice([value, [value], {"a": value}, {"_target_": "mtl.gates.TopKGate", "k": value}])
        with pytest.raises(InputError, match=r"does not use there"):
            check_config(changed(config, draw.choice(places.split()), {"v": value}), [], "x.ckpt")


def test_packages_of_the_user_need_trust(whole: Path) -> None:
    config = changed(read(whole)["config"], "gate._target_", "my_package.gates.Mine")
    with pytest.raises(InputError, match=r"add trust=\[my_package\]"):
        check_config(config, [], "x.ckpt")
    with pytest.raises(InputError, match=r"trust"):
        check_config(config, ["my_pack"], "x.ckpt")
    for trust in ("my_package", "my_package.gates", "my_package.gates.Mine"):
        check_config(config, [trust], "x.ckpt")


def test_nothing_but_words_and_the_network_comes_from_a_configuration(whole: Path, tmp_path: Path) -> None:
    config = read(whole)["config"]
    for key in ("callbacks.best.dirpath", "trainer.default_root_dir", "logger.tensorboard.save_dir", "paths.run_dir"):
        config = changed(config, key, "/elsewhere")
    for key in ("data.data_dir", "data.base_url", "trainer.profiler", "trainer._target_", "callbacks.best._target_"):
        config = changed(config, key, "/elsewhere")
    path = saved_with(whole, tmp_path, config=config)
    assert "elsewhere" not in str(resume_small(path, tmp_path / "new"))
    assert "elsewhere" not in str(config_to_load(read(path)))


def test_every_damage_is_found(whole: Path, tmp_path: Path) -> None:
    """Cut the file, and flip bits anywhere: either it is refused, or its content is what was written."""
    content, draw, path = whole.read_bytes(), random.Random(0), tmp_path / "last.ckpt"
    for data in (content[:-1], content[:1000], b"", b"x", content[:-80], content[1:]):
        path.write_bytes(data)
        with pytest.raises(InputError):
            read(path)
    expected, refused = tree_flatten(dict(read(whole))), 0
    for trial in range(60):
        data = bytearray(content)
        for _ in range(draw.choice([1, 8])):
            data[draw.randrange(len(data)) if trial % 3 else -draw.randrange(1, 3000)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        try:
            leaves, tree = tree_flatten(dict(read(path)))
        except InputError:
            refused += 1
            continue
        assert tree == expected[1]
        for leaf, wanted in zip(leaves, expected[0], strict=True):
            assert torch.equal(leaf, wanted) if isinstance(wanted, torch.Tensor) else leaf == wanted
    assert refused > 30
    path.write_bytes(content[:-1])
    previous_checkpoint(path).write_bytes(content)
    assert read_to_resume(path).path == previous_checkpoint(path)


def test_bombs_and_other_files_are_refused_before_they_are_loaded(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(InputError, match="zip bomb"):
        read(path)
    legacy = io.BytesIO()
    torch.save(dict(read(whole)), legacy, _use_new_zipfile_serialization=False)
    path.write_bytes(legacy.getvalue())
    with pytest.raises(InputError, match="damaged"):
        read(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float, whole: Path, tmp_path: Path) -> None:
    state = dict(read(whole)["state_dict"])
    name = next(name for name, tensor in state.items() if isinstance(tensor, torch.Tensor) and tensor.dim() > 1)
    state[name] = state[name].clone()
    state[name].view(-1)[3] = value
    path = saved_with(whole, tmp_path, state_dict=state)
    with pytest.raises(InputError, match=f"weights are NaN or infinite, the first is {name}"):
        read(path)


STOPPING = "EarlyStop{'monitor': 'val/loss', 'mode': 'min'}"
WEIGHTS = (torch.zeros(2, dtype=torch.complex64), torch.zeros(2).to_sparse())
FORGED: list[tuple[str, tuple[Any, ...], Any]] = [  # who reads it, where, what: None drops it
    *[("ckpt", ("pytorch-lightning_version",), value) for value in (None, [], "old")],
    *[("ckpt", ("loops",), value) for value in (3, {"a": 1}, None)],
    *[("ckpt", ("optimizer_states",), value) for value in (None, [{"a": 1}])],
    *[("ckpt", ("optimizer_states", 0, "param_groups"), value) for value in ("text", [])],
    *[("ckpt", ("callbacks", STOPPING), value) for value in ({"a": 1}, "text")],
    *[("evaluate", ("callbacks",), value) for value in ([], torch.zeros(2))],
    *[(who, ("epoch_sums",), value) for value in (3, {"a": 1}) for who in ("ckpt", "load")],
    *[(who, ("data",), value) for value in (3, {}, None) for who in ("evaluate", "load")],
    *[("load", ("data", "spec", "tasks", 0), value) for value in (None, 3, {"a": 1})],
    *[
        ("load", ("data", "spec", "tasks", 0, name), value)
        for name, value in (("after", {}), ("classes", [0]), ("name", 5))
    ],
    *[(who, ("data", "spec", "inputs", "I", "width"), "x") for who in ("load", "evaluate")],
    *[(who, ("state_dict", "W"), value) for value in WEIGHTS for who in ("ckpt", "evaluate", "load", "start_from")],
    ("load", ("metrics",), 5),
    *[("load", ("data", "spec", "inputs"), value) for value in (None, 3, {"a": 1})],
    *[(who, ("config", "data"), value) for value in ({"a": 1}, 3) for who in ("ckpt", "load")],
    *[(who, ("config", "overrides"), value) for value in (3, "text") for who in ("ckpt", "evaluate")],
    *[(who, ("state_dict", "W"), torch.zeros(2, 3)) for who in ("ckpt", "evaluate", "load")],
    *[(who, ("state_dict", "W"), value) for value in (None, "text") for who in ("evaluate", "load")],
    *[("load", (name,), value) for name in ("config", "state_dict") for value in ([1], 5)],
    ("start_from", ("state_dict",), {"a": 1}),
]


@pytest.mark.parametrize(("who", "place", "value"), FORGED, ids=str)
def test_forged_fields_are_one_sentence(
    who: str, place: tuple[Any, ...], value: Any, whole: Path, tmp_path: Path
) -> None:
    content: Any = copy.deepcopy(dict(read(whole)))
    weight = next(name for name, tensor in content["state_dict"].items() if isinstance(tensor, torch.Tensor))
    *parents, last = ({"W": weight, "I": next(iter(content["data"]["spec"]["inputs"]))}.get(key, key) for key in place)
    node = content
    for key in parents:
        node = node[key]
    node.pop(last) if value is None else node.__setitem__(last, value)
    path = tmp_path / "forged.ckpt"
    CheckpointIO().save_checkpoint(content, path)
    consumers: dict[str, Callable[[], object]] = {
        "load": lambda: load(path),
        "evaluate": lambda: run(resume_small(path, tmp_path / "new", evaluate=True)),
        "ckpt": lambda: run(resume_small(path, tmp_path / "new", "trainer.max_epochs=3")),
        "start_from": lambda: run(compose_small(tmp_path / "new", f"start_from='{path}'")),
    }
    with pytest.raises(InputError) as caught:
        consumers[who]()
    assert len(str(caught.value).splitlines()) == 1
    assert "checkpoint" in str(caught.value) or "start_from" in str(caught.value)
