"""Write a small made-up table of reviews, as a first example of ``data=text``."""

from __future__ import annotations

import random
from pathlib import Path

from mtl.writing import write_text

NAME = "example_reviews.tsv"
TASKS = {
    "liked": {"text": ["review"], "label": "liked", "kind": "binary", "metrics": ["accuracy", "auroc"]},
    "stars": {"text": ["review"], "label": "stars", "kind": "regression", "metrics": ["spearman", "mse"]},
    "same": {"text": ["review", "other"], "label": "same", "kind": "binary", "metrics": ["f1"]},
}
ROWS = 600
THINGS = ("soup", "room", "film", "phone", "garden", "novel", "train", "concert")
WORDS = (("awful", "dull", "broken"), ("poor", "slow", "noisy"), ("fine", "plain", "usual"))
BETTER = (("good", "pleasant", "solid"), ("superb", "brilliant", "wonderful"))


def write_example(folder: Path) -> Path:
    """Write the table into ``folder``, if it is not there, and return its path. Raises InputError."""
    file = folder / NAME
    if file.exists():
        return file
    draw = random.Random(0)
    lines = ["review\tother\tliked\tstars\tsame"]
    for _ in range(ROWS):
        thing, stars = draw.choice(THINGS), draw.randrange(5)
        same = draw.random() < 0.5
        other = thing if same else draw.choice([name for name in THINGS if name != thing])
        texts = (_review(draw, thing, stars), _review(draw, other, draw.randrange(5)))
        lines.append("\t".join([*texts, "yes" if stars >= 3 else "no", str(stars + 1), "yes" if same else "no"]))
    write_text(file, "\n".join(lines) + "\n")
    return file


def _review(draw: random.Random, thing: str, stars: int) -> str:
    words = [draw.choice((*WORDS, *BETTER)[stars]) for _ in range(draw.randint(1, 3))]
    return f"{draw.choice(('the', 'this', 'our'))} {thing} was {' and '.join(words)}."
