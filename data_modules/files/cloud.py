"""Read files in the cloud with polars, which finds the credentials in the usual variables and files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl

from mtl.checks import first_line
from mtl.files.cloud import CloudPath

FILE = "\0file"  # the column that names the file of each row
RETRIES = {"max_retries": 2}  # a second or so; polars itself tries for half a minute
CREDENTIALS = (
    "no credentials were found: set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION for s3://, "
    "GOOGLE_APPLICATION_CREDENTIALS for gs://, HF_TOKEN for hf://"
)


def scan(path: Path, **options: Any) -> pl.LazyFrame:
    """Return the rows of a Parquet file, or the lines of a text file, perhaps compressed, in the column ``line``."""
    if isinstance(path, CloudPath):
        options["storage_options"] = RETRIES
    if path.suffix == ".parquet":
        return pl.scan_parquet(str(path), hive_partitioning=False, **options)
    return pl.scan_lines(str(path), **options)


def count_rows(pattern: CloudPath) -> dict[str, int]:
    """Return the number of rows (of text files, of lines) of each file that is not empty, sorted by name.

    Of Parquet files, this reads the footers alone. The order of the columns may differ between files.
    """
    other = {"extra_columns": "ignore", "missing_columns": "insert"} if pattern.suffix == ".parquet" else {}
    files = scan(pattern, glob=True, include_file_paths=FILE, **other).group_by(FILE).len()
    return dict(files.sort(FILE).collect().iter_rows())


def describe_problem(error: BaseException) -> str:
    """Return what is wrong in few words, from an error of polars that has those of several programs."""
    text = str(error)
    if "expanded paths were empty" in text:
        return "no file matches this pattern"
    if re.search("/api/token|computeMetadata|redentials", text):  # asked last for them: services of a cloud's machines
        return CREDENTIALS
    if "error sending request" in text:
        return "the storage cannot be reached; if it is not Amazon's, AWS_ENDPOINT_URL must be its address"
    message = re.search("<Message>(.*?)</Message>", text)
    return message[1] if message else first_line(error).rpartition(" - ")[2].partition(" (path: ")[0][:200]
