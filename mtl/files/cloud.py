"""Addresses of files in the cloud, such as ``s3://bucket/day=*/*.parquet``. Imports nothing slow."""

from __future__ import annotations

import re
from pathlib import Path, PosixPath

ADDRESS = re.compile(r"(s3|gs|hf)://[^/]+/.+")


class CloudPath(PosixPath):
    """The address of a file in the cloud, or a pattern; as text it has both slashes, which paths join into one."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def absolute(self) -> CloudPath:
        """Return the address itself, which no working directory changes."""
        return self


def path_of(text: str | Path) -> Path:
    """Return the path of a local file or the address of one in the cloud."""
    return CloudPath(text) if ADDRESS.fullmatch(str(text)) else Path(text)
