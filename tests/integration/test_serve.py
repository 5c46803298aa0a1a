"""The server's answers are those of ``predict``, whatever arrives together with them."""

from __future__ import annotations

import asyncio
import contextlib
import html
import http.client
import json
import logging
import os
import pydoc
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import uvicorn
from mtl.data_modules.tables.columns.category import CategoryColumn
from mtl.data_modules.tables.columns.list import ListColumn
from mtl.data_modules.tables.columns.number import NumberColumn
from mtl.data_modules.tables.encoder import TableEncoder
from mtl.data_modules.tables.example import visits
from mtl.data_modules.tables.histograms import Histogram
from mtl.data_modules.tables.scale import Scale
from mtl.data_modules.tables.vocabulary import Vocabulary
from prometheus_client.parser import text_string_to_metric_families

import mtl
from mtl.checks import InputError
from mtl.cli.use import serve as main
from mtl.use import serve
from mtl.use.serve import Predictor, QueueFullError, application, describe, is_of_server, table
from mtl.use.trained import TrainedModel
from tests.integration.helpers import train_table
from tests.programs import free_port

TASKS = "{click: {column: clicked, kind: binary}, minutes: {kind: regression}, city: {kind: multiclass}}"
EMPTY = Histogram([0, 0], 0)
COLUMNS = ("user", "age", "hour", "device")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("gate=comet", f"data.tasks={TASKS}", "data.columns.age=number")
    return train_table(tmp_path_factory.mktemp("trained"), visits()[:300], *words) / "checkpoints" / "best.ckpt"


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> TrainedModel:
    return mtl.load(checkpoint, device="cpu")


@pytest.fixture(scope="module")
def port(checkpoint: Path, model: TrainedModel) -> Iterator[int]:
    """Return the port of a server that gathers up to 8 rows; at the end it stops as after a signal.

    It is patient for a fifth of a second.
    """
    app = application(Predictor(model, max_batch=8, max_wait=0.005), describe(model, checkpoint))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", http=serve.protocol()))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "CLIENT_TIMEOUT_S", 0.2)
        yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def ask(port: int, body: Any = None, path: str = "/predict") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        text = body if isinstance(body, str) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def open_connection(port: int, begin: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(begin.encode())
    return client


def send_on(client: socket.socket, content: bytes, pause: float = 0.0) -> None:
    """Send ``content`` again and again until the server closes the connection, which is a ConnectionError."""
    while True:
        client.sendall(content)
        time.sleep(pause)


def everything(client: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    return b"".join(iter(lambda: client.recv(65536), b""))


def rows(count: int = 60) -> list[dict[str, Any]]:
    """Return rows with an unknown category and empty cells."""
    some = visits()[300 : 300 + count].select(COLUMNS).to_dicts()
    return [{"user": 1060, "age": None, "hour": 3, "device": "watch"}, {**some[1], "device": None}, *some[2:]]


def same(found: list[dict[str, Any]], expected: pl.DataFrame) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected.to_dicts(), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_answers_of_many_clients_equal_predict(port: int, model: TrainedModel) -> None:
    everything = rows()
    requests = [everything[start : start + 1 + start % 8] for start in range(len(everything))]
    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(lambda some: ask(port, {"rows": some}), requests))
    for some, (status, answer) in zip(requests, answers, strict=True):
        assert status == 200
        same(answer["predictions"], model.predict(pl.DataFrame(some, infer_schema_length=None)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"rows": [*rows(3), {"user": 1, "hour": 2, "device": "phone"}]}, r"the request, row 4: no column 'age'"),
        (
            {"rows": [*rows(3), {**rows(3)[2], "age": "old"}]},
            "row 4: 'old' is not a number",
        ),
        ({"rows": [{**rows(3)[2], "age": [1]}]}, r"the request, column 'age', row 1: [1] is neither text nor number"),
        ({"rows": rows(9)}, r"9 rows in a request: at most 8 are accepted"),
        ({"rows": []}, r"the request needs a list of rows"),
        ('"\\ud800"', r"the request needs a list of rows"),
        (
            {"rows": [{**rows(3)[2], "device": "a\ud800"}]},
            r"column 'device', row 1: a\ud800 is neither text nor number",
        ),
        ({"rows": [{**rows(3)[2], "age": {"\udfff": 1}}]}, r"column 'age', row 1: {'\udfff': 1} is neither text nor"),
    ],
)
def test_bad_rows_get_one_message(port: int, body: Any, message: str) -> None:
    status, answer = ask(port, body)
    assert status == 422
    assert message in answer["detail"]


def test_half_a_character_in_a_list_is_refused_and_in_another_column_ignored(port: int) -> None:
    tags = ListColumn(name="tags", kind="list", length=1, vocabularies={"tags": Vocabulary([])}, histogram=EMPTY)
    with pytest.raises(InputError, match=r"column 'tags', row 1: .* is not a list"):
        table([{"tags": ["a", "\ud800"]}], TableEncoder({"tags": tags}))
    assert ask(port, {"rows": [{**rows(3)[2], "more": "\ud800"}]})[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_large_body_is_refused_before_it_is_read(port: int, chunked: bool) -> None:
    how = "Transfer-Encoding: chunked" if chunked else "Content-Length: 300000000"
    with open_connection(port, f"POST /predict HTTP/1.1\r\nHost: x\r\n{how}\r\n\r\n") as client:
        if chunked:
            for _ in range(17):
                client.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
        assert b"HTTP/1.1 413" in everything(client)


BEGUN = "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"


@pytest.mark.parametrize("begin", ["POST /predict HTTP/1.1\r\nX: ", f"GET /health HTTP/1.1\r\nHost: x\r\n\r\n{BEGUN}"])
def test_slow_client_is_cut_off(begin: str, port: int) -> None:
    with open_connection(port, begin) as client:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            send_on(client, b"x", 0.02)
        assert 0.15 < time.monotonic() - began < 5


def test_client_that_does_not_read_is_cut_off(port: int) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.settimeout(10)
        client.connect(("127.0.0.1", port))
        request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 1000
        with pytest.raises(ConnectionError):
            send_on(client, request)


def test_answer_may_take_longer_than_a_client(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = TrainedModel.predict
    monkeypatch.setattr(TrainedModel, "predict", lambda *args, **kwargs: time.sleep(0.5) or found(*args, **kwargs))
    assert ask(port, {"rows": rows(3)})[0] == 200


def test_documentation_and_health(port: int, checkpoint: Path) -> None:
    with open_connection(port, "GET /docs HTTP/1.1\r\nHost: <x>\r\nConnection: close\r\n\r\n") as client:
        page = everything(client).decode()
    assert "<script" not in page  # of another server
    assert "<x>" not in page
    example = shlex.split(html.unescape(page.partition("<pre>")[2].partition("</pre>")[0]))
    assert set(json.loads(example[-1])["rows"][0]) == set(COLUMNS)
    assert ask(port, example[-1])[0] == 200
    status, about = ask(port, path="/health")
    assert status == 200
    assert about["ready"] is True
    assert [task["name"] for task in about["tasks"]] == ["click", "minutes", "city"]
    assert set(about["model"]["columns"]) == set(COLUMNS)
    assert about["versions"].keys() == {"mtl", "torch", "python"}
    assert isinstance(about["unusual_cells"], str)


def measured(port: int) -> dict[str, float]:
    """Return the values of /metrics by name and labels, as Prometheus reads them."""
    with open_connection(port, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as client:
        text = everything(client).decode().partition("\r\n\r\n")[2]
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{each.name}{sorted(each.labels.values())}": each.value for each in samples}


def test_metrics_count_requests_rows_and_unusual_cells(port: int) -> None:
    before = measured(port)
    strange = [{**row, "user": "nobody"} for row in rows(3)]
    assert ask(port, {"rows": strange})[0] == 200
    assert ask(port, {"rows": [{}]})[0] == 422
    assert ask(port, "no rows")[0] == 422
    after = measured(port)
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert change["mtl_requests_total['200']"] == 1
    assert change["mtl_requests_total['422']"] == 2
    assert (change["mtl_rows_total[]"], change["mtl_answer_seconds_count[]"]) == (3, 1)
    assert change["mtl_unusual_cells_total['unknown or rare categories', 'user']"] == 3
    assert 0 < change["mtl_answer_seconds_sum[]"] < 20


def test_mixed_types_of_a_column_are_cells_of_their_own(port: int, model: TrainedModel) -> None:
    some = rows(5)[2:]
    mixed = [{**some[0], "hour": 3, "user": "1060"}, {**some[1], "hour": 3.0, "user": 1060}, {**some[2], "age": "31"}]
    _, together = ask(port, {"rows": mixed})
    for row, found in zip(mixed, together["predictions"], strict=True):
        same([found], model.predict(pl.DataFrame([row])))


def test_cells_are_read_as_in_a_text_file() -> None:
    cells = [True, 3, 3.0, 0.5, "v1.0", "", None]
    column = CategoryColumn(name="x", vocabularies={"x": Vocabulary([])}, histogram=EMPTY)
    found = table([{"x": cell, "more": 1} for cell in cells], TableEncoder({"x": column}))
    assert found.to_dict(as_series=False) == {"x": ["true", "3", "3", "0.5", "v1.0", "", None]}


@pytest.mark.parametrize("form", ["1.234,5", "1,234.5", "€ 1.234,5"])
def test_numbers_in_json_are_numbers_whatever_the_format_of_the_training_rows(form: str) -> None:
    scales = {"price": Scale(0.0, 1.0, False)}
    encoder = TableEncoder({"price": NumberColumn(name="price", format=form, scales=scales, histogram=EMPTY)})
    prices = [123.456, 12, 1e-7, -1234567.0]
    found = encoder.encode(table([{"price": price} for price in prices], encoder), "rows")
    assert found["numeric columns"][:, 0].tolist() == pytest.approx(prices)


def test_full_queue_refuses_and_the_end_answers_what_waits(model: TrainedModel) -> None:
    predictor = Predictor(model, max_batch=2, waiting=3)
    waiting = [predictor.submit(rows(3)[2:]) for _ in range(3)]  # nobody works yet
    with pytest.raises(QueueFullError):
        predictor.submit(rows(3)[2:])
    waiting[1].cancel()
    predictor._jobs.maxsize = 4  # room for the end
    with predictor:
        pass
    assert waiting[0].result(0) == waiting[2].result(0)
    assert waiting[1].cancelled()


def test_command_serves_with_its_options(checkpoint: Path) -> None:
    seen: dict[str, Any] = {}
    main([str(checkpoint), "--port", "9000"], server=lambda app, **options: seen.update(options, app=app))
    assert (seen["host"], seen["port"], seen["app"].title) == ("127.0.0.1", 9000, "mtl")
    with pytest.raises(SystemExit, match=r"error: --max-batch=0: must be greater than"):
        main([str(checkpoint), "--max-batch", "0"])


def test_command_with_workers_passes_its_options_on(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (serve.METRICS, serve.WORKERS):
        monkeypatch.setenv(name, "")  # so that the old values come back
    seen, threads = dict[str, Any](), list[int]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def server(app: str, **options: Any) -> None:
        assert Path(os.environ[serve.METRICS]).is_dir()
        seen.update(options, made=pydoc.locate(app.replace(":", "."))())
        assert pydoc.locate(options["http"].replace(":", ".")) is serve.connection

    main([str(checkpoint), "--workers", "3", "--max-batch", "7"], server=server)
    assert (seen["workers"], seen["factory"], seen["made"].title, threads) == (3, True, "mtl", [2])
    assert json.loads(os.environ[serve.WORKERS])["max_batch"] == 7
    with pytest.raises(SystemExit, match=r"error: --workers=0: must be greater than"):
        main([str(checkpoint), "--workers", "0"])


@pytest.mark.slow
def test_workers_count_together(checkpoint: Path, tmp_path: Path) -> None:
    number = free_port()
    command = [sys.executable, "-m", "mtl", "serve", str(checkpoint), "--port", str(number), "--workers", "2"]
    server = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        until = time.monotonic() + 120
        while len([*tmp_path.glob("mtl-serve-*/counter_*.db")]) < 2:  # a file of each worker that has begun
            assert time.monotonic() < until
            time.sleep(0.2)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: ask(number, {"rows": rows(2)})[0], range(40)))
        assert found == [200] * 40
        assert {measured(number)["mtl_requests_total['200']"] for _ in range(5)} == {40}
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    assert not list(tmp_path.glob("mtl-serve-*"))


def test_what_a_second_interrupt_cuts_off_leaves_no_traceback() -> None:
    """A request has its error in the record; the shutdown of the application has it as text alone."""
    for error, shown in ((asyncio.CancelledError(), False), (ValueError("x"), True)):
        for text, info in (("x", (type(error), error, None)), ("".join(traceback.format_exception(error)), None)):
            record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 1, text, None, info)
            assert is_of_server(record) == shown
