"""The pages' commands that other tests do not run: on checkpoints, several machines, pretrained networks, and studies.

What a machine may lack is replaced: GPUs by CPU processes, two machines of four by two of one, Slurm by a script that
sets its variables, large data and searches by small ones. The rest of each command is as on the page.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mtl.data_modules.tables.example import visits

from mtl.cli import columns, report, reproduce, tune
from mtl.files.run_files import read_json
from mtl.paper import command
from tests.conftest import ROOT
from tests.pages import blocks, commands
from tests.programs import free_port
from tests.transformers import save_encoder, save_vocabulary

pytestmark = pytest.mark.slow
TINY = ["trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.accelerator=cpu", "callbacks.progress=null"]
TINY += ["callbacks.routing.figures=false"]
SMALL = [*TINY, "data.rows=[120,40,40]"]
ONE = {
    "trainer=ddp": "trainer=ddp_cpu",
    "trainer=fsdp": "trainer=fsdp_cpu",
    "trainer.devices=4": "trainer.devices=2",
}  # what one machine has instead
TWO = {"--nproc-per-node=4": "--nproc-per-node=1", "--ntasks-per-node=4": "--ntasks-per-node=1"}
TWO |= ONE | {"trainer.devices=4": "trainer.devices=1"}
SRUN = """#!{python}
import os, subprocess, sys
options = dict(word[2:].split("=") for word in sys.argv[1:] if word.startswith("--"))
nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
same = dict(SLURM_JOB_ID="1", SLURM_NTASKS=nodes * tasks, SLURM_NNODES=nodes, SLURM_NTASKS_PER_NODE=tasks)
same |= dict(SLURM_NODELIST="127.0.0.1", SLURM_JOB_NAME="mtl", MASTER_PORT="{port}")
words, running = [word for word in sys.argv[1:] if not word.startswith("--")], []
for rank in range(nodes * tasks):
    own = dict(SLURM_PROCID=rank, SLURM_NODEID=rank // tasks, SLURM_LOCALID=rank % tasks)
    env = os.environ | {{name: str(value) for name, value in (same | own).items()}}
    running.append(subprocess.Popen(words, env=env))
sys.exit(max(process.wait() for process in running))
"""


def started(words: list[str], folder: Path, **env: str) -> str:
    """Run a command as its user does, in ``folder``, and return what it printed."""
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Return the folder of two finished runs, on simulated data and on texts."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["mtl", "train", *SMALL, "hydra.run.dir=outputs/DATE/RUN"]
    started([*words, "callbacks.early_stopping=null"], folder)
    shutil.copytree(tiny_data, folder / "data")
    texts = ["mtl", "train", *TINY, "data=glue", "data.tasks=[rte,mrpc]", "network.config={hidden_size: 16}"]
    started([*texts, "data.vocabulary=200", "hydra.run.dir=outputs/TEXTS/RUN"], folder)
    return folder


ON_RUNS = [words for words in commands("mtl train") if "outputs/DATE/RUN" in " ".join(words)]


@pytest.mark.parametrize("words", ON_RUNS, ids=" ".join)
def test_commands_on_a_checkpoint(words: list[str], trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    if "experiment=glue_finetune" in words:
        [vocabulary] = (tmp_path / "data" / "cache").glob("vocabulary-*")
        small = ["network.config={hidden_size: 16}", "network.pretrained=null", f"data.tokenizer={vocabulary}"]
        words = [word.replace("DATE", "TEXTS") for word in words] + [*small, *TINY]
    elif words[0].startswith("start_from="):
        words = [*words, *SMALL]
    elif words[0].startswith("ckpt="):
        words = [*words, "trainer.max_epochs=2"]
    assert "loss" in started(["mtl", "train", *words], tmp_path)


SEVERAL = [words for words in blocks() if any(word.startswith(("trainer=ddp", "trainer=fsdp")) for word in words)]


@pytest.mark.parametrize("words", SEVERAL, ids=lambda words: words[0])
def test_commands_for_several_processes(words: list[str], tmp_path: Path, tiny_data: Path) -> None:
    shutil.copy(ROOT / "train.py", tmp_path)
    (tmp_path / "srun").write_text(SRUN.format(python=sys.executable, port=free_port()))
    (tmp_path / "srun").chmod(0o755)
    small = [*TINY, f"paths.data_dir={tiny_data}"] if "data=movielens" in words else SMALL
    here = TWO if "trainer.num_nodes=2" in words else ONE
    words, small = [here.get(word, word) for word in words], [*small, "hydra.run.dir=run"]
    if words[0] == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", *words[1:], *small]
        agents = [word.replace("HOST:29500", f"127.0.0.1:{free_port()}") for word in torchrun]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        running = [subprocess.Popen(agents, cwd=tmp_path, env=env) for _ in range(2)]
        assert [process.wait(400) for process in running] == [0, 0]
    else:
        started([*words, *small], tmp_path)
    assert read_json(tmp_path / "run" / "results.json")["numbers"]["test"]["network"]["loss"] is not None


def test_a_pretrained_network(tmp_path: Path, tiny_data: Path) -> None:
    """The name on the page is that of a small folder here."""
    [words] = [words for words in commands("mtl train") if "network.pretrained=bert-base-uncased" in words]
    save_encoder(tmp_path / "bert-base-uncased", "bert")
    save_vocabulary(tmp_path / "bert-base-uncased")
    small = [*TINY, f"paths.data_dir={tiny_data}", "data.max_length=20"]
    started(["mtl", "train", *words, *small, "hydra.run.dir=run"], tmp_path)
    assert read_json(tmp_path / "run" / "results.json")["numbers"]["test"]["network"]["loss"] is not None


def test_a_sweep_with_two_workers(tmp_path: Path) -> None:
    [words] = [words for words in commands("mtl train") if "hydra/launcher=joblib" in words]
    small = [*SMALL, "trainer.log_every_n_steps=1"]
    started(["mtl", "train", *words, *small, "hydra.sweep.dir=outputs/multirun/DATE/SWEEP"], tmp_path)
    assert len(list((tmp_path / "outputs").glob("**/results.json"))) == 4
    [words] = [words for words in commands("mtl report") if "--curve" in words]
    started(["mtl", "report", *words], tmp_path)
    assert "train/step_loss over training" in next(tmp_path.glob("outputs/**/report.html")).read_text()


def on(words: list[str], address: str) -> list[str]:
    return [re.sub(r"postgresql\+psycopg://user@host/db", address, word) for word in words]


def test_commands_of_mtl_tune(
    tmp_path: Path, tiny_data: Path, postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order: some show what others have found."""
    monkeypatch.chdir(tmp_path)
    visits()[:400].write_csv("visits.csv")
    columns.main(max(commands("mtl columns"), key=len))
    for words in commands("mtl tune"):
        data = [] if "data=visits" in words else [f"paths.data_dir={tiny_data}"]
        tune.main([*on(words, postgresql), *data, *([] if "show=best" in words else ["n_trials=1", *TINY])])
    assert len(list((tmp_path / "outputs").glob("**/results.json"))) == 7  # four gates, mine, and two of the table
    [words] = [words for words in commands("mtl report") if "study=comet_movielens" in words]
    report.main(words)


RUNS = [words for words in commands("mtl reproduce") if len(words) > 1 and not words[-1].startswith("judge=")]


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_commands_of_mtl_reproduce(
    words: list[str], tmp_path: Path, tiny_data: Path, postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one trial and one seed of each row."""
    monkeypatch.chdir(tmp_path)
    read = command.read

    def smaller(*given: object) -> command.Paper:
        found = read(*given)
        scale = found.scale.model_copy(update={"seeds": 1, "n_trials": min(found.scale.n_trials, 1)})
        return dataclasses.replace(found, scale=scale, groups=found.groups[:1], methods=found.methods[:2])

    monkeypatch.setattr(command, "read", smaller)
    small = [*TINY, f"paths.data_dir={tiny_data}"]
    if "show=true" in words:
        reproduce.main([*(word for word in words if word != "show=true"), *small])
        small = []
    reproduce.main([*on(words, postgresql), *small])
    [report] = (tmp_path / "outputs" / "paper").glob("*/*/report.html")
    num_rows = 1 if "scale=smoke" in words else 2  # those of smoke are in different groups
    assert len(list(report.parent.glob("**/results.json"))) >= num_rows


def test_new_rows_with_labels_are_evaluated(tmp_path: Path) -> None:
    visits()[:400].write_csv(tmp_path / "visits.csv")
    visits()[400:440].write_csv(tmp_path / "new.csv")
    tasks = [
        "data.tasks.clicked={column: clicked, kind: binary}",
        "data.tasks.minutes={column: minutes, kind: regression}",
    ]
    started(["mtl", "train", *TINY, "data=table", "data.path=visits.csv", *tasks, "hydra.run.dir=RUN"], tmp_path)
    [words] = [words for words in commands("mtl evaluate") if words[0] == "RUN"]  # others are of another page's run
    assert "auroc" in started(["mtl", "evaluate", *words, "callbacks.progress=null"], tmp_path)
