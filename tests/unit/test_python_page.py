"""The blocks of docs/python.md run one after the other, as in a notebook; what they leave is what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtl.checks import InputError
from tests.conftest import ROOT
from tests.trees import few_trees


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the variables after all blocks, with fewer epochs and folds than on the page."""
    text = (ROOT / "docs" / "python.md").read_text().replace("cv=3", "cv=2")
    text = re.sub(r"max_epochs=(20|5)\b", "max_epochs=2", text)
    variables: dict[str, Any] = {}
    with few_trees(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            exec(compile(block, "docs/python.md", "exec"), variables)
        variables["folder"] = Path.cwd()
    return variables


def test_scores_are_those_of_good_models(page: dict[str, Any]) -> None:
    """Means of AUROC, R2 and F1, so at most 1."""
    assert all(0.5 < score < 1 for score in page["scores"])
    assert list(page["predicted"]) == ["clicked", "minutes", "plan"]


def test_own_trainer_returns_metrics_and_is_loaded(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(page["folder"])
    metrics, model = page["metrics"], page["model"]
    assert {"test/loss", "test/clicked/auroc", "test/minutes/mse", "test/plan/accuracy"} <= metrics.keys()
    [validated] = page["trainer"].validate(page["module"], datamodule=page["data"], verbose=False)
    assert {"val/loss", "val/clicked/auroc"} <= validated.keys()
    assert model.evaluate(page["frame"])["clicked/auroc"] > 0.8
    assert str(page["module"].network.mixture.gate) == "CometGate(tasks=3, experts=4, k=2, gamma=0.1)"
    model.save("again.ckpt")
    again = page["mtl"].load("again.ckpt", network=page["network"](model.spec), data=page["table"]())
    assert again.predict(page["frame"]).equals(model.predict(page["frame"]))
    with pytest.raises(InputError, match="give network and data together"):
        page["mtl"].load("own.ckpt", network=model.network)
