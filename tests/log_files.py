"""Write files of made-up rows in the layouts of Census-Income and KuaiRand."""

from __future__ import annotations

import random
from pathlib import Path

from mtl.data_modules.census_income import COLUMNS, MARITAL, NUMERIC_COLUMNS
from mtl.data_modules.kuairand import YES_OR_NO

LOG = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)


def write_census(folder: Path, rows: int = 60) -> None:
    """Write ``rows`` training rows and half as many test rows; no two people have the same dividends."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("census-income.data", "census-income.test")):
        rng, lines = random.Random(number), []
        for row in range(rows // (1 + number)):
            cells = {column: rng.choice(["Not in universe", "?", "Yes"]) for column in COLUMNS}
            cells |= {column: str(rng.randrange(90)) for column in NUMERIC_COLUMNS}
            cells[MARITAL] = "Never married" if row % 3 else "Divorced"
            cells |= {
                "dividends from stocks": str(1000 * number + row),
                "instance weight": f"{1700 + row}.09",
                "year": "95",
            }
            cells["income"] = "50000+." if row % 4 == 0 else "- 50000."
            lines.append(", ".join(cells[column] for column in COLUMNS))
        (folder / name).write_text("\n".join(lines) + "\n")


def write_kuairand(folder: Path, rows: int = 60) -> None:
    """Write two standard logs of ``rows`` each, the later rows first, and a random one; no pair has two rows."""
    folder.mkdir(parents=True, exist_ok=True)
    spans = ("standard_4_08_to_4_21", "standard_4_22_to_5_08", "random_4_22_to_5_08")
    for number, span in enumerate(spans):
        rng, lines = random.Random(number), [LOG]
        for row in reversed(range(rows)):
            found = dict.fromkeys(LOG.split(","), "0")
            found |= {name: str(rng.randrange(2)) for name in YES_OR_NO}
            found |= {name: str(rng.randrange(90_000)) for name in found if name.endswith(("_time", "_time_ms"))}
            found |= {"user_id": str(row % 7), "video_id": str(row + number), "date": "20220409", "tab": str(row % 3)}
            found |= {"hourmin": str(row % 24 * 100), "duration_ms": str(5000 + row), "is_rand": str(number // 2)}
            found["time_ms"] = str(1649400000000 + 1000 * (rows * number + row))
            lines.append(",".join(found.values()))
        (folder / f"log_{span}_pure.csv").write_text("\n".join(lines) + "\n")
