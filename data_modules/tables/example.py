"""Write a small table of made-up rows, which ``data=table`` serves if no file is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import torch

from mtl.files.writing import writing
from mtl.nn.seeds import make_generator

from ..files.cache import locked

NAME, NUM_ROWS, NUM_USERS = "example_visits.csv", 20_000, 400
CITIES, DEVICES = ("Bergen", "Cork", "Lyon", "Porto", "Turku"), ("desktop", "phone", "tablet")
TASKS: dict[str, dict[str, Any]] = {
    "click": {"column": "clicked", "kind": "binary"},
    "minutes": {"column": "minutes", "kind": "regression", "weight": 0.1},
}


def write_example(folder: Path) -> Path:
    """Write the example table into ``folder`` unless it exists, and return its path.

    Each row is a visit to a shop: user, city, age, hour, device, whether something was clicked, and ``minutes`` (empty
    without a click). The rows are always the same. Raises InputError if ``folder`` cannot be written.
    """
    path = folder / NAME
    if not path.exists():
        with locked(folder / f".{NAME}.lock", f"writing {path}"), writing(path) as file:
            visits().write_csv(file)
    return path


def visits() -> pl.DataFrame:
    """Draw the rows: both tasks depend on a trait of the user and, in different ways, on hour, age, city and device."""
    generator = make_generator(0)

    def draw(high: int, size: int) -> torch.Tensor:
        return torch.randint(high, (size,), generator=generator)

    trait = torch.randn(NUM_USERS, generator=generator)
    home, years = draw(len(CITIES), NUM_USERS), 16 + draw(60, NUM_USERS)
    user, hour, device = draw(NUM_USERS, NUM_ROWS), draw(24, NUM_ROWS), draw(len(DEVICES), NUM_ROWS)
    evening = torch.cos((hour - 20) * (2 * torch.pi / 24))
    age, city = years[user], home[user]
    logit = 1.5 * trait[user] + evening * (1 + (device == 1)) - 0.5 * (city == 2)
    clicked = torch.rand(NUM_ROWS, generator=generator) < logit.sigmoid()
    minutes = 4 + trait[user] - evening + 0.03 * (age - 45) + 0.5 * torch.randn(NUM_ROWS, generator=generator)
    frame = pl.DataFrame(
        {
            "user": (1000 + user).numpy(),
            "city": [CITIES[number] for number in city.tolist()],
            "age": age.numpy(),
            "hour": hour.numpy(),
            "device": [DEVICES[number] for number in device.tolist()],
            "clicked": ["yes" if value else "no" for value in clicked.tolist()],
            "minutes": minutes.double().round(decimals=2).numpy(),
        }
    )
    return frame.with_columns(minutes=pl.when(pl.col("clicked") == "yes").then("minutes"))
