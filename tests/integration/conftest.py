"""A server that several test files need."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.programs import free_port


@pytest.fixture
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a PostgreSQL server and return the URL of its database."""
    pytest.importorskip("psycopg")
    tools = {name: shutil.which(name) for name in ("initdb", "postgres")}
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: install the package postgresql")
    folder, port = tmp_path_factory.mktemp("postgresql"), free_port()
    as_user: dict[str, Any] = {}
    if os.geteuid() == 0:  # which PostgreSQL refuses
        as_user = {"user": "postgres", "cwd": "/"}
        for path in (folder, *folder.parents[:-2]):
            path.chmod(0o755)
        shutil.chown(folder, "postgres")
    data = folder / "data"
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([str(tools["initdb"]), "-D", str(data), "-A", "trust", "-U", "mtl"], check=True, **quiet, **as_user)
    options = ["-p", str(port), "-c", "listen_addresses=127.0.0.1", "-k", str(folder), "-c", "fsync=off"]
    server = subprocess.Popen([str(tools["postgres"]), "-D", str(data), *options], **quiet, **as_user)
    address = f"postgresql+psycopg://mtl@127.0.0.1:{port}/postgres"
    try:
        _wait_for_server(address)
        yield address
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def _wait_for_server(address: str) -> None:
    import psycopg

    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(address.replace("+psycopg", "")).close()
            return
        except psycopg.OperationalError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
