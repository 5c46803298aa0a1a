"""Answer requests with a trained network: ``mtl serve RUN``.

POST /predict with ``{"rows": [{"age": 31, "city": "Lyon"}, ...]}`` returns ``{"predictions": [...]}``, one object for
each row, with the columns of ``mtl.load(...).predict``. A row must have all columns that the network reads; null is an
empty cell, and numbers and booleans are categories as in a text file. A cell of a list column is a list, or text with
separators if the training rows were text. GET /health describes the model, and counts unknown categories and far-off
numbers. GET /metrics has counts and times for Prometheus. GET /docs is a page with examples, GET /openapi.json the
schema.
"""

from __future__ import annotations

import asyncio
import html
import json
import logging
import os
import platform
import queue
import re
import shlex
import threading
import time
from collections import Counter as Counts
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import polars as pl
import torch
from pydantic import BaseModel, Field

from mtl import __version__
from mtl.checks import InputError, require, require_packages
from mtl.data_modules.tables.cells import Remarks
from mtl.options import Count, NonNegative, valid
from mtl.predictions import task_summary
from mtl.types import RowEncoder
from mtl.use.trained import TrainedModel, load

log = logging.getLogger(__name__)

MAX_PENDING_REQUESTS = 1024  # requests that may wait for the network; more are refused
MAX_REQUEST_BYTES = 16 << 20  # bytes of a request
CLIENT_TIMEOUT_S = 30.0  # seconds that a client may take to send a request, and to read the answer
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # seconds
ROWS_IN_MESSAGES = "the request"  # name of the rows in messages
ROWS_EXPECTED = 'the request needs a list of rows: {"rows": [{"column": value, ...}, ...]}'
PROTOCOL = "mtl.use.serve:connection"
WORKERS = "MTL_SERVE"  # the variable with the options of ``worker``
METRICS = "PROMETHEUS_MULTIPROC_DIR"  # that prometheus_client reads: a folder that all processes count in
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: JSON can hold it, UTF-8 cannot


class Request(BaseModel):
    """The body of a request."""

    rows: Annotated[list[dict[str, Any]], Field(min_length=1)]


class QueueFullError(Exception):
    """Report that too many requests are waiting."""


@dataclass
class Job:
    """The rows of one request as a table, and where its answer will be."""

    frame: pl.DataFrame
    answer: Future[list[dict[str, Any]]] = field(default_factory=Future)


class Predictor:
    """Predict the rows of many requests together, in one thread, since encoding one row takes as long as encoding many.

    Requests are gathered until there are ``max_batch`` rows or the first request has waited for ``max_wait`` seconds.
    Use it as a context manager: on exit, it answers all waiting requests. ``interval``: see ``TrainedModel.predict``.
    """

    def __init__(
        self,
        model: TrainedModel,
        max_batch: int = 256,
        max_wait: float = 0.002,
        waiting: int = MAX_PENDING_REQUESTS,
        interval: float | None = None,
    ) -> None:
        require(bool(model.columns), "this network reads no rows of a table, so there is nothing to serve")
        spans = [task.name for task in model.spec.tasks if task.kind == "span"]
        require(not spans, f"task {', '.join(spans)} finds answers in texts: it cannot be served")
        if interval is not None:
            model.margins(interval, model.spec.tasks)
        self.model, self.max_batch, self.max_wait, self.interval = model, max_batch, max_wait, interval
        self._jobs: queue.Queue[Job | None] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._work, name="predictor")

    def __enter__(self) -> Predictor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._jobs.put(None)
        self._thread.join()
        if self.unusual_cells:
            log.warning("all requests, %s", self.unusual_cells)

    @property
    def unusual_cells(self) -> str:
        """See ``RowEncoder.unusual_cells``."""
        return "" if self.model.encoder is None else self.model.encoder.unusual_cells()

    def submit(self, rows: Sequence[Mapping[str, Any]]) -> Future[list[dict[str, Any]]]:
        """Return the future predictions of ``rows``. Raises InputError for bad rows, FullError if too many wait."""
        require(len(rows) <= self.max_batch, f"{len(rows)} rows in a request: at most {self.max_batch} are accepted")
        assert self.model.encoder is not None  # it has columns
        job = Job(table(rows, self.model.encoder))
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise QueueFullError from None
        return job.answer

    def _work(self) -> None:
        going = True
        while going:
            jobs, going = self._gathered()
            self._answer([job for job in jobs if job.answer.set_running_or_notify_cancel()])  # unless the client left

    def _gathered(self) -> tuple[list[Job], bool]:
        """Return the requests of a batch, and whether more will come. The last one may exceed ``max_batch``."""
        jobs, job, until = list[Job](), self._jobs.get(), time.monotonic() + self.max_wait
        while job is not None:
            jobs.append(job)
            if sum(len(job.frame) for job in jobs) >= self.max_batch:
                break
            try:
                job = self._jobs.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
        return jobs, job is not None

    def _answer(self, jobs: Sequence[Job]) -> None:
        """Predict the rows of ``jobs`` together and answer each job; a job with bad rows gets the error."""
        if not jobs:
            return
        try:
            frame = pl.concat([job.frame for job in jobs])
            table = self.model.predict(frame, batch_size=self.max_batch, where=ROWS_IN_MESSAGES, interval=self.interval)
            predictions = table.to_dicts()
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].answer.set_exception(error)
            else:  # answer the good ones
                self._answer(jobs[: len(jobs) // 2])
                self._answer(jobs[len(jobs) // 2 :])
            return
        for job in jobs:
            job.answer.set_result(predictions[: len(job.frame)])
            predictions = predictions[len(job.frame) :]


def table(rows: Sequence[Mapping[str, Any]], encoder: RowEncoder) -> pl.DataFrame:
    """Return the columns of ``encoder`` as text, so that the meaning of a cell does not depend on other cells' types.

    Columns of lists become lists of texts. Raises InputError, which names row (from 1) and column, if a cell is missing
    or has the wrong type.
    """
    lists = encoder.lists
    cells: dict[str, list[Any]] = {name: [] for name in encoder.columns}
    for number, row in enumerate(rows, 1):
        for name, column in cells.items():
            require(name in row, f"{ROWS_IN_MESSAGES}, row {number}: no column {name!r}, which the network reads")
            where = f"{ROWS_IN_MESSAGES}, column {name!r}, row {number}"
            column.append(read(row[name], lists.get(name), where, partial(encoder.written, name)))
    return pl.DataFrame(cells, {name: pl.List(pl.String) if name in lists else pl.String for name in cells})


def read(
    cell: Any, separator: str | None, where: str, written: Callable[[float], str]
) -> str | list[str | None] | None:
    """Return a cell as text, or as a list of texts if its column holds lists (``separator`` is not None)."""
    quoted = f"{where}: {str(cell)[:60]}"
    if separator is None:
        require(is_cell(cell), f"{quoted} is neither text nor number")
        return as_text(cell, written)
    elements = cell.split(separator) if isinstance(cell, str) and separator else cell
    text = f", nor text with {separator!r} between the elements" if separator else ""
    good = elements is None or (isinstance(elements, list) and all(map(is_cell, elements)))
    require(good, f"{quoted} is not a list of texts or numbers{text}")
    return None if elements is None else [as_text(element, written) for element in elements]


def is_cell(value: Any) -> bool:
    """Return whether ``value`` is empty, text or a number."""
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and not SURROGATE.search(value))


def as_text(value: str | float | bool | None, written: Callable[[float], str]) -> str | None:
    """Return a cell as it is written in a text file: true, 3, 0.5."""
    if isinstance(value, bool):
        return str(value).lower()
    return written(value) if isinstance(value, int | float) else value


def describe(model: TrainedModel, path: str | Path) -> dict[str, Any]:
    """Return the answer of /health."""
    network = type(model.core).__name__
    return {
        "model": {"checkpoint": Path(path).name, "network": network, "columns": model.columns},
        "tasks": [{"name": task.name, **task_summary(task)} for task in model.spec.tasks],
        "versions": {"mtl": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def page(about: Mapping[str, Any], address: str) -> str:
    """Return the answer of /docs, which needs no file from elsewhere; ``about``: see ``describe``."""
    body = json.dumps({"rows": [dict.fromkeys(about["model"]["columns"])]}, ensure_ascii=False)
    call = f"curl {shlex.quote(f'{address}predict')} -H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}"
    tasks = ", ".join(f"{task['name']} ({task['kind']})" for task in about["tasks"])
    return (
        f"<!doctype html><meta charset=utf-8><title>mtl serve</title><h1>mtl serve: {html.escape(tasks)}</h1>"
        f"<p>POST /predict returns the predictions of each row; null is an empty cell.<pre>{html.escape(call)}</pre>"
        "<p><a href=health>GET /health</a> describes the model and counts unusual cells."
        "<p><a href=metrics>GET /metrics</a> has counts and times for Prometheus."
        "<p><a href=openapi.json>GET /openapi.json</a> is the schema of the requests."
    )


class Measured:
    """What GET /metrics shows: requests by status, rows, seconds of an answer, and unusual cells by column.

    Of several processes, the sums.
    """

    def __init__(self, predictor: Predictor) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self.registry, self.encoder = CollectorRegistry(), predictor.model.encoder
        status = "Requests to /predict, by the status of the answer"
        self.requests = Counter("mtl_requests", status, ["status"], registry=self.registry)
        self.rows = Counter("mtl_rows", "Rows that were predicted", registry=self.registry)
        seconds = "From a read request to its answer"
        self.seconds = Histogram("mtl_answer_seconds", seconds, buckets=BUCKETS, registry=self.registry)
        text = "Cells that the training rows say little about, by kind and column"
        self.unusual = Counter("mtl_unusual_cells", text, ["kind", "column"], registry=self.registry)
        self.counted = Counts[tuple[str, str]]()

    def answered(self, rows: int, seconds: float) -> None:
        self.requests.labels(200).inc()
        self.rows.inc(rows)
        self.seconds.observe(seconds)
        unusual = getattr(self.encoder, "remarks", Remarks()).unusual
        now = Counts(dict(unusual))  # a copy, since the predictor counts meanwhile
        for key in now:
            self.unusual.labels(*key).inc(now[key] - self.counted[key])
        self.counted = now

    def text(self) -> bytes:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        if METRICS not in os.environ:
            return generate_latest(self.registry)
        every = CollectorRegistry()
        MultiProcessCollector(every)  # type: ignore[no-untyped-call]  # prometheus_client has no types there
        return generate_latest(every)


def application(predictor: Predictor, about: Mapping[str, Any]) -> Any:
    """Return the FastAPI application; ``about``: see ``describe``."""
    import fastapi

    @asynccontextmanager
    async def running(app: Any) -> AsyncIterator[None]:
        with predictor:
            yield

    app = fastapi.FastAPI(title="mtl", lifespan=running, max_body_size=MAX_REQUEST_BYTES, docs_url=None, redoc_url=None)

    measured = Measured(predictor)

    async def predict(request: Request) -> dict[str, Any]:
        start = time.perf_counter()
        try:
            answer = await answered(request)
        except fastapi.HTTPException as error:
            measured.requests.labels(error.status_code).inc()
            raise
        measured.answered(len(request.rows), time.perf_counter() - start)
        return answer

    async def answered(request: Request) -> dict[str, Any]:
        try:
            return {"predictions": await asyncio.wrap_future(predictor.submit(request.rows))}
        except InputError as error:
            raise fastapi.HTTPException(422, str(error).encode(errors="backslashreplace").decode()) from None
        except QueueFullError:
            raise fastapi.HTTPException(503, "too many requests are waiting; try again later") from None

    async def health() -> dict[str, Any]:
        return {"ready": True, **about, "unusual_cells": predictor.unusual_cells}

    async def docs(request: Any) -> Any:
        return fastapi.responses.HTMLResponse(page(about, str(request.base_url)))

    async def metrics() -> Any:
        return fastapi.responses.PlainTextResponse(measured.text(), media_type="text/plain; version=0.0.4")

    async def no_rows(request: Any, error: Exception) -> Any:
        measured.requests.labels(422).inc()
        # FastAPI's own answer repeats the whole request
        return fastapi.responses.JSONResponse({"detail": ROWS_EXPECTED}, 422)

    app.exception_handler(fastapi.exceptions.RequestValidationError)(no_rows)
    app.post("/predict")(predict)
    app.get("/health")(health)
    app.get("/metrics")(metrics)
    app.add_route("/docs", docs)  # FastAPI's own page loads scripts from a server
    return app


@cache
def protocol() -> Any:
    """Return uvicorn's protocol with time limits: the connection of a client that keeps it waiting is closed.

    uvicorn itself waits for ever for the rest of a request, and for a client that does not read its answer.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc]  # its class depends on the packages that are installed
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch(self)

        def _watch(self, before: Any) -> None:
            """Close the connection if it still waits for the client at request ``before`` (None: the first request)."""
            request = self.cycle
            read = request is not None and not request.more_body
            ours = read and not request.response_started and not self.flow.write_paused
            if self.transport.is_closing() or (request is before and not ours):
                self.transport.abort()  # close() would wait until the client reads the rest
            else:
                self.loop.call_later(CLIENT_TIMEOUT_S, self._watch, self if ours else request)

    return Protocol


def connection(**options: Any) -> Any:
    """Return uvicorn's protocol of one connection; by its name, other processes find it."""
    return protocol()(**options)


def is_of_server(record: logging.LogRecord) -> bool:
    """Return whether a record of uvicorn's is no traceback of what a second Ctrl-C cut off: requests, the shutdown."""
    of_request = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not (of_request or record.getMessage().rstrip().endswith("asyncio.exceptions.CancelledError"))


def prepare(
    path: str | Path,
    trust: Sequence[str],
    max_batch: int,
    max_wait_ms: float,
    interval: float | None = None,
    model: str | None = None,
) -> tuple[Any, Any]:
    """Return the application that serves a run, and uvicorn's function ``run``; ``model``: see ``mtl.load``."""
    valid(Count, max_batch, "--max-batch")
    valid(NonNegative, max_wait_ms, "--max-wait-ms")
    require_packages("mtl serve", "serve", "fastapi", "uvicorn", "prometheus_client")
    import uvicorn

    logging.getLogger("uvicorn.error").addFilter(is_of_server)
    loaded = load(path, trust, model=model)
    app = application(Predictor(loaded, max_batch, max_wait_ms / 1000, interval=interval), describe(loaded, path))
    return app, uvicorn.run


def serve_in_workers(run: Any, workers: int, prepared: Mapping[str, Any], **options: Any) -> None:
    """Serve in ``workers`` processes, each with its own network; ``prepared``: the arguments of ``prepare``."""
    with TemporaryDirectory(prefix="mtl-serve-") as folder:
        os.environ |= {METRICS: folder, WORKERS: json.dumps({"workers": workers, **prepared})}
        run("mtl.use.serve:worker", factory=True, workers=workers, timeout_worker_healthcheck=60, **options)


def worker() -> Any:
    """Return the application of one of several processes, which share the threads of torch."""
    arguments = json.loads(os.environ[WORKERS])
    torch.set_num_threads(max(1, torch.get_num_threads() // arguments.pop("workers")))
    return prepare(**arguments)[0]
