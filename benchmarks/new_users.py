"""Loss on rows of users who are not in the training rows, by the share of categories that training hides.

Run: python benchmarks/new_users.py. The ratings of MovieLens 100K in the order of their times: networks train on the
first 60 or 80 %, a random tenth of them chooses the epoch, and the next 20 % of the ratings are the test. "mean" is the
network without hidden categories, whose embeddings of unknown categories are replaced by the mean of the others.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import polars as pl
import torch

import mtl
from mtl.checks import require

TASKS = {"liked": "binary", "rating": "regression"}


def ratings(folder: Path) -> pl.DataFrame:
    """Return the ratings of MovieLens 100K or 1M in the order of their times, with what is known of the users."""
    large = (folder / "ratings.dat").exists()  # of 1M
    about = ["user", "gender", "age", "job", "zip"] if large else ["user", "age", "gender", "job", "zip"]

    def read(file: str, separator: str, names: list[str]) -> pl.DataFrame:
        table = pl.read_csv(folder / file, separator=separator, has_header=False, infer_schema_length=None)
        table = table[:, :: 2 if large else 1]  # the second sign of "::" makes an empty column
        return table.rename(dict(zip(table.columns, names, strict=True)))

    rows = read(*(("ratings.dat", ":") if large else ("u.data", "\t")), ["user", "item", "rating", "time"])
    require(rows["time"].n_unique() > 1, f"{folder}: all ratings have the same time")
    users = read(*(("users.dat", ":") if large else ("u.user", "|")), about).drop("zip")
    rows = rows.sort("time").join(users, on="user", how="left", maintain_order="left").drop("time")
    return rows.with_columns(liked=(pl.col("rating") >= 4).cast(int))


def losses(rows: pl.DataFrame, start: float, share: float, seed: int) -> dict[str, float]:
    """Return the loss on the ratings that follow, of new and of known users, and that of "mean" on new users."""
    train, later = rows[: int(start * len(rows))], rows[int(start * len(rows)) : int((start + 0.2) * len(rows))]
    options: dict[str, Any] = {"data.vocabulary.unknown_rate": share, "data.seed": seed}
    options["data.columns"] = {"user": "category", "item": "category"}
    model = mtl.fit(train, TASKS, seed=seed, accelerator="cpu", options=options, progress=False)
    is_known = pl.col("user").is_in(train["user"].unique().implode())
    losses_of_users = {
        "new": model.evaluate(later.filter(~is_known))["loss"],
        "known": model.evaluate(later.filter(is_known))["loss"],
    }
    bottom: Any = model.network.bottom
    with torch.no_grad():
        for table in bottom.embeddings:
            table.weight[0] = table.weight[1:].mean(0)
    return losses_of_users | {"new, mean": model.evaluate(later.filter(~is_known))["loss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/ml-100k"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.01, 0.03, 0.1, 0.3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = ratings(args.data)
    for start in (0.6, 0.8):
        for share in args.shares:
            runs = [losses(rows, start, share, seed) for seed in range(args.seeds)]
            means = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
            shown = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items() if share == 0 or "mean" not in name)
            print(f"first {start:.0%} of the ratings, share {share}: {shown}", flush=True)


if __name__ == "__main__":
    main()
