"""Serve a folder over HTTP, in place of the sites that data sets are fetched from, and make archives."""

from __future__ import annotations

import contextlib
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Yield the address under which the files of ``folder`` can be fetched."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def zipped(archive: Path, root: Path, folder: str = ".") -> Path:
    """Write the files in ``folder`` of ``root`` to a zip file, by their paths in ``root``."""
    with zipfile.ZipFile(archive, "w") as content:
        for file in sorted(path for path in (root / folder).rglob("*") if path.is_file()):
            content.write(file, file.relative_to(root))
    return archive
