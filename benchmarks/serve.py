"""Requests a second of ``mtl serve``, and how long the slowest take: ``python benchmarks/serve.py``.

Clients of this process send requests of one row over connections that stay open, each its next one after the answer.
They take processor time from the server, which is on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

WARM_UP = 2.0  # seconds that are not counted
MTL = [sys.executable, "-m", "mtl"]
WORDS = ["data=table", "trainer.max_epochs=2", "trainer.accelerator=cpu", "blend=none"]
ROW = {"user": "1060", "city": "Lyon", "age": 31, "hour": 3, "device": "phone"}


async def client(port: int, body: bytes, end: float) -> list[tuple[float, float]]:
    """Return when each answer came, and the seconds that it took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    answers = []
    while (start := time.perf_counter()) < end:
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.startswith(b"http/1.1 200"), answer
        await reader.readexactly(int(answer.partition(b"content-length:")[2].split()[0]))
        now = time.perf_counter()
        answers.append((now, now - start))
    writer.close()
    return answers


async def load(port: int, clients: int, seconds: float) -> tuple[float, float, float]:
    """Return requests a second, and the median and 99th percentile of the milliseconds of an answer."""
    body, start = json.dumps({"rows": [ROW]}).encode(), time.perf_counter() + WARM_UP
    every = await asyncio.gather(*(client(port, body, start + seconds) for _ in range(clients)))
    taken = [1000 * seconds for answers in every for when, seconds in answers if when >= start]
    return len(taken) / seconds, float(np.median(taken)), float(np.quantile(taken, 0.99))


def wait_for(port: int) -> None:
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--port", type=int, default=8123)
    args = parser.parse_args()
    print("| workers | clients | requests a second | median, ms | 99th percentile, ms |\n|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*MTL, "train", *WORDS, f"paths.run_dir={folder}/run"], check=True, capture_output=True)
        for workers in args.workers:
            command = [*MTL, "serve", f"{folder}/run", "--port", str(args.port), "--workers", str(workers)]
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
                wait_for(args.port)
                time.sleep(10 * workers)  # until all have loaded the network
                for clients in args.clients:
                    rate, median, slow = asyncio.run(load(args.port, clients, args.seconds))
                    print(f"| {workers} | {clients} | {rate:.0f} | {median:.1f} | {slow:.1f} |", flush=True)
                server.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
