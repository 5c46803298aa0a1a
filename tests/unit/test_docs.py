"""README and the pages of ``docs/``: their links lead somewhere, and their commands are accepted."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from mtl.cli import reproduce, tune
from mtl.cli.study import split_words
from mtl.config.check import check
from mtl.paper.definition import read
from tests.conftest import ROOT
from tests.integration.helpers import composed

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(program: str) -> list[list[str]]:
    """Return the words of each ``python <program> ...`` of the pages, comments left out, each command once."""
    found = {}
    for page in PAGES:
        text = page.read_text()
        shell = "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
        inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for line in [*shell.splitlines(), *(" ".join(code.split()) for code in inline)]:
            words = shlex.split(line.partition(f"{program} ")[2], comments=True)
            if words and not {"...", "--help"} & {*words, *line.split()}:
                found[shlex.join(words)] = words
    return list(found.values())


def test_readme_is_short() -> None:
    """It shows the way; the pages of docs/ have the rest."""
    assert len((ROOT / "README.md").read_text().splitlines()) < 250


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!https://)([^)]+)\)", text):
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve()
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE) if heading else []
        assert not heading or heading in {title.lower().replace(" ", "-") for title in titles}, link
    for command in re.findall(r"python (\S+\.py)", text):
        assert (ROOT / command).is_file(), command
    for name in re.findall(r"python -m (mtl[\w.]*)", text):
        assert importlib.util.find_spec(name), name


def test_commands_of_runs_are_accepted() -> None:
    """Every option exists and has a value that it accepts. Files and checkpoints are not read."""
    given = commands("train.py")
    assert len(given) > 20
    for command in given:
        if "--config-dir" in command:  # test_readme.py runs it
            continue
        # The first job of a sweep; what its launcher has to be is not a matter of the run
        words = [word for word in command if not word.startswith(("-m", "hydra"))]
        words = [re.sub(r"^(\w+=[^,{\[]+),.*", r"\1", word) for word in words]
        keys = {word.partition("=")[0] for word in words}
        if keys & {"evaluate", "ckpt"} and any(key.startswith("data.") for key in keys):  # data of the checkpoint
            words.insert(0, "data=table")
        cfg = composed([*words, "trainer.accelerator=cpu"])
        cfg.label, cfg.paths.run_dir = "test", "."
        check(cfg)


def test_commands_of_studies_are_accepted() -> None:
    given = commands("tune.py")
    assert len(given) > 1
    for command in given:
        study, others = split_words(command, tune.OWN)
        special = dict(word.split("=") for word in others)
        assert set(special) <= {"gate", "show"}
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose("tune", study)
        assert set(special.get("gate", "").split(",")) <= {"", *cfg.gates}


def test_commands_of_papers_are_accepted() -> None:
    given = commands("reproduce.py")
    assert len(given) > 1
    for command in given:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            name, cfg, others, _ = reproduce.configuration(command)
        assert not others, others
        assert read(cfg, name, others).pairs()


def test_every_table_of_a_paper_is_listed() -> None:
    text = (ROOT / "docs" / "papers.md").read_text()
    assert {path.stem for path in (ROOT / "conf" / "paper").glob("*.yaml")} <= set(re.findall(r"`(\w+)`", text))
