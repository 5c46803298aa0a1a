"""The commands that README and the pages of ``docs/`` show."""

from __future__ import annotations

import re
import shlex

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = {f"python {name}.py": f"mtl {name}" for name in ("train", "tune", "reproduce")}


def blocks() -> list[list[str]]:
    """Return the words of each command in the pages' blocks of shell, comments left out; each command once."""
    found = {}
    for page in PAGES:
        shell = "\n".join(re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)).replace("\\\n", " ")
        for line in shell.splitlines():
            words = shlex.split(line, comments=True)
            for command in " ".join(map(shlex.quote, words)).split(" '&&' "):
                found[command] = [word for word in shlex.split(command) if word != "&"]
    return [words for words in found.values() if words]


def commands(*programs: str) -> list[list[str]]:
    """Return the words after each ``mtl train ...`` of the pages, or other programs, in blocks and in the text."""
    texts = [re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL) for page in PAGES]
    inline = [code.split() for text in texts for code in re.findall(r"`([^`]+)`", text)]
    found = {}
    for words in [*blocks(), *(shlex.split(" ".join(words)) for words in inline if words[0] in ("mtl", "python"))]:
        text = shlex.join(words)
        for long, short in PROGRAMS.items():  # also after torchrun or srun
            text = text if f"{long.split()[1]} " not in text else f"{short} {text.partition(f'{long.split()[1]} ')[2]}"
        given = shlex.split(text)
        if " ".join(given[:2]) in programs and given[2:] and not {"...", "--help"} & {*given}:
            found[text] = given[2:]
    return list(found.values())
