"""README and the pages of ``docs/``: their links lead somewhere, and their commands are accepted."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from hydra import compose
from omegaconf import OmegaConf

import mtl
from mtl.cli import reproduce, share, tune
from mtl.cli.command_line import read_line
from mtl.cli.main import COMMANDS
from mtl.config.compose import split_overrides
from mtl.options import valid
from mtl.paper.definition import read
from mtl.python.fit import own_hydra
from mtl.sharing.settings import ShareOptions
from mtl.tune import definition
from tests.conftest import ROOT
from tests.integration.helpers import accepted, composed
from tests.pages import PAGES, blocks, commands

# Programs that are not ours; of pip the test below looks at the extras
OTHERS = {
    ".",
    ".ci/types",
    "cd",
    "cp",
    "curl",
    "echo",
    "git",
    "mkdir",
    "mkdocs",
    "paste",
    "pip",
    "pytest",
    "python3",
    "ruff",
    "srun",
    "tensorboard",
    "torchrun",
}


def test_readme_is_short() -> None:
    """It shows the way; the pages of docs/ have the rest."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!https://)([^)]+)\)", text):
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve()
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE) if heading else []
        assert not heading or heading in {
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles
        }, link
    for link in re.findall(r'src="([^"]+)"', text):
        assert (page.parent / link).is_file(), link
    for command in re.findall(r"python (\S+\.py)", text):
        assert (ROOT / command).is_file(), command
    for name in re.findall(r"python -m (mtl[\w.]*)", text):
        assert importlib.util.find_spec(name), name
    for name in re.findall(r"\bmtl ([a-z]+)\b(?=[^`]*`)", " ".join(re.findall(r"`mtl [^`]*`", text))):
        assert name in COMMANDS, name


def test_every_command_of_a_block_is_known() -> None:
    """It is checked below, or run by tests/integration/test_readme.py, or belongs to another program."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for words in blocks():
        own = words[0] == "mtl" and words[1] in COMMANDS
        own |= words[:2] == ["python", "train.py"]
        assert own or words[0] in OTHERS, words
        for name in re.findall(r"\.\[(.*)\]", " ".join(words)) if words[0] == "pip" else ():
            assert extras.issuperset(name.split(",")), name


def test_every_block_of_python_is_run() -> None:
    """The tests of these pages run theirs: test_readme, test_extend, test_model_in_use and test_python_page."""
    assert {page.stem for page in PAGES if "```py" in page.read_text()} == {"README", "extend", "in_use", "python"}
    assert {page.stem for page in PAGES if "```yaml" in page.read_text()} == {"extend", "tuning"}


def test_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    assert sorted(re.findall(r"^::: mtl\.(\w+)$", text, flags=re.MULTILINE)) == sorted(mtl.__all__)


def test_commands_of_runs_are_accepted() -> None:
    """Every option exists and has a value that it accepts. Files and checkpoints are not read."""
    given = commands("mtl train")
    assert len(given) > 20
    for command in given:
        if "--config-dir" in command:  # test_extend.py runs it
            continue
        # The first job of a sweep; what its launcher has to be is not a matter of the run
        words = [word for word in read_line(command).overrides if not word.startswith("hydra")]
        words = [re.sub(r"^(\w+=[^,{\[]+),.*", r"\1", word) for word in words]
        keys = {word.partition("=")[0] for word in words}
        if keys & {"evaluate", "ckpt"} and any(key.startswith("data.") for key in keys):  # data of the checkpoint
            words.insert(0, "data=table")
        accepted([*words, "trainer.accelerator=cpu"])


def test_commands_of_studies_are_accepted() -> None:
    given = commands("mtl tune")
    assert len(given) > 1
    for command in given:
        study, others = split_overrides([word for word in command if "=" in word], tune.OWN)  # no --config-dir
        special = dict(word.split("=") for word in others)
        assert set(special) <= {"gate", "show", "data"}
        with own_hydra():
            cfg = compose("tune", study)
        assert set(special.get("gate", "").split(",")) <= {"", *cfg.methods}


def test_study_of_the_page_is_read(tmp_path: Path) -> None:
    """Its options exist; the data that it names are those of a reader."""
    [text] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "tuning.md").read_text(), flags=re.DOTALL)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "narrow.yaml").write_text(text.replace("data=visits", "data=table"))
    with own_hydra():
        cfg = compose("tune", ["study=narrow", f"hydra.searchpath=[file://{tmp_path}]"])
    found = definition.read(cfg, "narrow", list(cfg.methods), [])
    assert [each.label for each in found] == ["softmax", "comet"]
    for each in found:
        run = composed(each.overrides)
        assert all(OmegaConf.select(run, option) is not None for option in each.space)


def test_commands_of_papers_are_accepted() -> None:
    given = commands("mtl reproduce")
    assert len(given) > 1
    for command in given:
        with own_hydra():
            name, cfg, others, _ = reproduce.configuration(command)
        assert not others, others
        assert read(cfg, name, others).rows()


def test_commands_of_mtl_share_are_accepted() -> None:
    given = commands("mtl share")
    assert len(given) > 2
    for command in given:
        own, others = split_overrides([word for word in command if "=" in word], share.OWN)
        with own_hydra():
            assert valid(ShareOptions, OmegaConf.to_container(compose("share", own)), "")
            assert composed([word for word in others if not word.startswith("data.path")])


def test_every_table_of_a_paper_is_listed() -> None:
    text = (ROOT / "docs" / "papers.md").read_text()
    assert {path.stem for path in (ROOT / "conf" / "paper").glob("*.yaml")} <= set(re.findall(r"`(\w+)`", text))
