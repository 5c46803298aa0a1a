"""Load-test ``mtl serve``: requests per second and latency for 1, 8 and 64 clients, compared to ``model.predict``.

    python benchmarks/serve.py [--requests 2000]

Each client sends requests of one row over its own connection, one after the other. The clients run in another process
on the same machine. Every answer is compared with that of ``predict``. The network is trained for one
epoch on the example of ``data=table``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, options, write

# isort: split
import polars as pl
from mtl.data_modules.tables.example import visits

import mtl

HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
CLIENTS = (1, 8, 64)
TASKS = "{click: {column: clicked, kind: binary}, minutes: {kind: regression}}"


def train(folder: Path) -> Path:
    """Train on the example table; return the checkpoint."""
    visits().write_csv(folder / "visits.csv")
    words = ["data=table", f"data.path={folder}/visits.csv", f"data.tasks={TASKS}", "trainer.max_epochs=1"]
    words += [f"hydra.run.dir={folder}/run", "callbacks.progress=null"]
    subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder / "run" / "checkpoints" / "best.ckpt"


async def client(port: int, bodies: Sequence[bytes], answers: list[Any], seconds: list[float]) -> None:
    """Send ``bodies`` one after the other; add the predictions to ``answers`` and the latencies to ``seconds``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for body in bodies:
        start = time.perf_counter()
        writer.write(HEAD + b"%d\r\n\r\n" % len(body) + body)
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(headers.partition(b"content-length:")[2].split(b"\r\n")[0])
        content = await reader.readexactly(length)
        seconds.append(time.perf_counter() - start)
        assert headers.startswith(b"http/1.1 200"), content
        answers.append(json.loads(content)["predictions"])
    writer.close()


async def load(port: int, clients: int, bodies: Sequence[bytes]) -> tuple[float, list[list[Any]], list[float]]:
    """Return the seconds that all requests took, the answers of each client, and all latencies."""
    answers: list[list[Any]] = [[] for _ in range(clients)]
    seconds: list[float] = []
    start = time.perf_counter()
    await asyncio.gather(*(client(port, bodies[i::clients], answers[i], seconds) for i in range(clients)))
    return time.perf_counter() - start, answers, seconds


def largest_difference(answers: Sequence[Sequence[Any]], expected: Sequence[dict[str, Any]]) -> float:
    """Return the largest difference of a number; raise AssertionError if an answer is missing or a class differs."""
    clients, largest = len(answers), 0.0
    assert sum(map(len, answers)) == len(expected), "answers were lost"
    for number, row in enumerate(expected):
        [found] = answers[number % clients][number // clients]
        assert found.keys() == row.keys()
        for name, value in row.items():
            if isinstance(value, float):
                largest = max(largest, abs(found[name] - value))
            else:
                assert found[name] == value, (name, found, row)
    return largest


def started(checkpoint: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the server; return it when it is ready."""
    command = [sys.executable, "-m", "mtl", "serve", str(checkpoint), "--port", str(port)]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return server
        except OSError:
            assert server.poll() is None, "the server did not start"
            time.sleep(0.1)


def main() -> None:
    given = options(
        __doc__,
        rounds=3,
        requests=(int, 2000, "requests of each number of clients"),
    )
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        checkpoint = train(Path(folder))
        model = mtl.load(checkpoint, device="cpu")
        frame = visits()
        frame = pl.concat([frame] * (given.requests // len(frame) + 1))[: given.requests].select(model.columns)
        bodies = [json.dumps({"rows": [row]}).encode() for row in frame.to_dicts()]
        expected = model.predict(frame).to_dicts()
        table = []
        for size in (256, 1):
            some, seconds = frame[: 64 * size], []
            for _ in range(given.rounds):
                start = time.perf_counter()
                model.predict(some, batch_size=size) if size > 1 else [model.predict(some[i]) for i in range(len(some))]
                seconds.append((time.perf_counter() - start) / len(some))
            table.append({"": f"model.predict, batches of {size}", "rows/s": 1 / statistics.median(seconds)})
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        server = started(checkpoint, port)
        try:
            asyncio.run(load(port, 8, bodies[:200]))  # warm-up
            for clients in CLIENTS:
                runs = [asyncio.run(load(port, clients, bodies)) for _ in range(given.rounds)]
                differences = [largest_difference(answers, expected) for _, answers, _ in runs]
                cuts = [statistics.quantiles(latencies, n=100) for _, _, latencies in runs]
                row = {"": f"{clients} clients" if clients > 1 else "1 client"}
                row |= {"rows/s": statistics.median(len(bodies) / seconds for seconds, _, _ in runs)}
                row |= {"p50 ms": 1000 * statistics.median(cut[49] for cut in cuts)}
                row |= {"p99 ms": 1000 * statistics.median(cut[98] for cut in cuts)}
                table.append(row | {"largest difference": f"{max(differences):.1e}"})
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(20)
    notes = [f"{given.requests} requests of one row each; the server ended with status {status} after SIGTERM."]
    write(given, "serve", "Requests to mtl serve", table, notes)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
