"""KuaiRand: what users of a video app did with each video they were shown, a task for each kind of feedback."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any, Literal

from mtl.options import Address, FilePath, NonEmpty, validated

from .files.download import fetch_archive
from .table import TableDataModule
from .tables.options import ColumnOptions, CsvOptions

YES_OR_NO = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter")
TIME_FEEDBACK = ("play_time_ms", "profile_stay_time", "comment_stay_time")
FEEDBACK = (*YES_OR_NO, *TIME_FEEDBACK)
BINARY_TASK = {"kind": "binary", "positive": "1"}
TIME_TASK = {"kind": "regression", "metrics": ["mae", "rmse"]}  # in milliseconds
Feedback: Any = Literal.__getitem__(FEEDBACK)
CATEGORY_COLUMNS, NUMERIC_COLUMNS = ("user_id", "video_id", "hourmin", "tab"), ("duration_ms",)
UNUSED_COLUMNS = ("date", "time_ms", "is_rand")


ARCHIVES = {  # the name of each version and the md5 of its archive, which Zenodo publishes
    "pure": ("KuaiRand-Pure", "0820331067a3784d9691136f772b35a7"),
    "1k": ("KuaiRand-1K", "6b0b9c8222d67fcd4c676218edca3f1f"),
}


class KuaiRandDataModule(TableDataModule):
    """Serve the logs of KuaiRand (Gao et al. 2022), a row for each video that a user was shown, as a table.

    ``variant`` pure has 7,583 videos, 1k all videos of 1,000 users. ``tasks`` are kinds of feedback; the paper counts
    12, with the duration of the video, which is an input here: is_click, is_like, is_follow, is_comment, is_forward,
    is_hate, long_view and is_profile_enter (binary), play_time_ms, profile_stay_time and comment_stay_time
    (regressions). Inputs: the user, the video, its duration, the hour, and the scenario (``tab``). ``log`` standard has
    the videos that the app recommended, random those that it drew at random. By
    default the rows are split by time. For the other options see ``TableDataModule``.
    """

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        variant: Literal["pure", "1k"] = "pure",
        tasks: NonEmpty[Feedback] = FEEDBACK,
        log: Literal["standard", "random"] = "standard",
        download: bool = True,
        base_url: Address = "https://zenodo.org/records/10439422/files",
        **common: Any,
    ) -> None:
        self.download, self.base_url = download, base_url
        name, self.md5 = ARCHIVES[variant]
        self.archive = data_dir / f"{name}.tar.gz"
        folder, ending = data_dir / name / "data", f"{variant}.csv"
        spans = ("4_08_to_4_21", "4_22_to_5_08") if log == "standard" else ("4_22_to_5_08",)
        self.logs = [folder / f"log_{log}_{span}_{ending}" for span in spans]
        kinds = {name: BINARY_TASK if name in YES_OR_NO else TIME_TASK for name in tasks}
        unread = [*UNUSED_COLUMNS, *(name for name in FEEDBACK if name not in tasks)]
        category, number = ColumnOptions(kind="category"), ColumnOptions(kind="number")
        columns = dict.fromkeys(CATEGORY_COLUMNS, category) | dict.fromkeys(NUMERIC_COLUMNS, number)
        split: Any = {"by": "time", "column": "time_ms", **common.pop("split", {})}
        csv = CsvOptions(separator=",")
        pattern = Path(glob.escape(str(folder))) / f"log_{log}_*_{ending}"
        super().__init__(pattern, kinds, data_dir, columns, unread, split, csv=csv, **common)

    def prepare_data(self) -> None:
        for file in self.logs:
            fetch_archive(file, self.archive, self.base_url, f"md5:{self.md5}", self.download)
