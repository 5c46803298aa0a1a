"""The blocks of docs/extend.md, as a package outside the repository: they train, are permuted and pruned."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from mtl.cli import use
from mtl.experts.dispatch import used_share
from tests.conftest import ROOT
from tests.programs import Forked, Outcome

MINE = ("data=mine", "gate=threshold", "experts=gated", "network=two_mixtures", "permutation=sinkhorn")
QUICK = ("trainer.accelerator=cpu", "callbacks.progress=null", "callbacks.routing.figures=false")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the page's Python as the module ``my_package``, and its YAML files in ``my_conf``."""
    folder = tmp_path_factory.mktemp("package")
    page = (ROOT / "docs" / "extend.md").read_text()
    (folder / "my_package.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)))
    for text in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL):
        [name] = re.findall(r"# (my_conf/.*)", text)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def train(package: Path, folder: Path, *words: str) -> dict[str, float]:
    words = (*MINE, "--config-dir", str(package / "my_conf"), *QUICK, f"hydra.run.dir={folder}", *words)  # in any order
    done = Forked(words, folder.parent / "output", cwd=ROOT, env={"PYTHONPATH": str(package)}).wait()
    assert done.status == 0, done.output
    results: dict[str, float] = json.loads((folder / "results.json").read_text())["numbers"]["test"]["network"]
    return results


def prune(package: Path, folder: Path, *words: str) -> Outcome:
    """Run ``mtl prune <words>``."""
    return Forked(words, folder, cwd=ROOT, env={"PYTHONPATH": str(package)}, main=use.prune).wait()


def test_own_classes_train_sparse_and_are_reported(package: Path, tmp_path: Path) -> None:
    losses = [train(package, tmp_path / way, f"network.execution={way}") for way in ("dense", "sparse")]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-4)
    assert losses[0]["experts_per_sample_layer_1"] < 4
    written = {path.name for path in (tmp_path / "sparse" / "routing").iterdir()}
    names = ("expert_share", "weights_over_training", "permutation")
    assert written == {f"{name}_layer_{layer}.csv" for name in names for layer in (0, 1)}


def test_layer_in_a_plain_model(package: Path) -> None:
    mine = runpy.run_path(str(package / "my_package.py"))
    (dense, loss), (sparse, other) = (mine["train_two_tasks"](execution) for execution in ("dense", "sparse"))
    assert loss == pytest.approx(other, rel=1e-4)
    _, routing = sparse.mixture(torch.randn(64, 20))
    assert used_share(routing.weights) < 0.9  # there was something to leave out
    for value, same in zip(dense.parameters(), sparse.parameters(), strict=True):
        assert torch.allclose(value, same, atol=1e-3)


def test_own_classes_resume_from_the_folder_of_a_search_path(package: Path, tmp_path: Path) -> None:
    """As trials of studies do: their folders are trusted like those of --config-dir."""
    train(package, tmp_path / "run")
    words = [f"ckpt='{tmp_path}/run'", f"hydra.searchpath=['file://{package}/my_conf']", "recipe.max_epochs=2"]
    done = Forked(words, tmp_path / "output", cwd=ROOT, env={"PYTHONPATH": str(package)}).wait()
    assert done.status == 0, done.output
    assert json.loads((tmp_path / "run" / "results.json").read_text())["epochs"] == 2


def test_own_network_is_pruned(package: Path, tmp_path: Path) -> None:
    train(package, tmp_path / "run", "recipe.static_gate=true")
    checkpoint = str(tmp_path / "run" / "checkpoints" / "best.ckpt")
    done = prune(package, tmp_path / "output", checkpoint)
    assert done.status == 1
    assert "add trust=[my_package]" in done.output
    done = prune(package, tmp_path / "output", "--trust", "my_package", checkpoint)
    assert done.status == 0, done.output
    savings = json.loads((tmp_path / "run" / "pruned" / "savings.json").read_text())
    assert savings.keys() == {"click", "seconds"}
    for row in savings.values():
        assert row["difference"] <= 1e-5
        assert row["pruned_parameters"] < row["parameters"]
