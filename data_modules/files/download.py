"""Fetch files over HTTP: a lost connection, a killed process or a full disk never leaves an incomplete file."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mtl.checks import InputError

from ..options import CONTROL, is_address

logger = logging.getLogger(__name__)

CHUNK = 1 << 16  # bytes
MAX_BYTES = 200_000_000  # the largest file fetched, unless the caller expects a larger one
SLOWEST, WINDOW = 1000.0, 30.0  # bytes per second, and the seconds over which they are counted
NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError)  # ValueError: not a URL


class _FailedError(Exception):
    """The download cannot continue; the message says why."""


class _ConnectionLostError(Exception):
    """The connection was lost; the next attempt resumes after the bytes received."""


def fetch(
    url: str,
    dest: Path,
    md5: str | None = None,
    sha256: str | None = None,
    timeout: float = 10.0,
    by_hand: str | None = None,
    connect_timeout: float = 5.0,
    retries: int = 4,
    pause: float = 0.5,
    progress: bool = True,
    max_bytes: int = MAX_BYTES,
    slowest: float = SLOWEST,
    window: float = WINDOW,
) -> Path:
    """Download ``url`` to ``dest`` and return ``dest``; do nothing if ``dest`` exists and its checksum is right.

    Bytes are written to ``dest`` + ".part". An existing part is resumed; a complete one with the right checksum is
    renamed. ``timeout`` seconds without data, or fewer than ``slowest`` bytes per second for ``window`` seconds, count
    as a lost connection, which is retried ``retries`` times, ``pause`` seconds apart. A server that does not answer the
    first attempt within ``connect_timeout`` seconds ends the download, and so does a file of more than ``max_bytes``.
    Only http and https addresses are fetched, also after a redirect. ``by_hand`` tells the user what to do without the
    network. Raises InputError. Two processes must not fetch the same ``dest`` at the same time: callers hold a lock.
    """
    checksums = {"md5": md5, "sha256": sha256}
    shown_url = clean(url)
    part = dest.with_name(dest.name + ".part")
    by_hand = by_hand or f"put the file at {dest}"
    try:
        if dest.exists():
            wrong = _mismatch(dest, checksums)
            if wrong is None:
                return dest
            logger.warning("%s is downloaded again: %s", dest, wrong)
        _check_address(url)
        dest.parent.mkdir(parents=True, exist_ok=True)
        older = part.exists()
        transfer = _Transfer(url, part, timeout, connect_timeout, max_bytes, _Pace(slowest, window))
        with _bar(progress) as bar:
            transfer.run(bar, retries, pause)
            wrong = _mismatch(part, checksums)
            if wrong is not None and older:  # the part may be from another version of the file: start over
                part.unlink()
                transfer.run(bar, retries, pause)
                wrong = _mismatch(part, checksums)
        if wrong is not None:
            part.unlink()
            raise _FailedError(wrong)
        os.replace(part, dest)
    except _FailedError as error:
        raise InputError(
            f"cannot download {dest.name} from {shown_url}: {error}. Without the network: {by_hand}"
        ) from error
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"cannot write {part} (downloading {shown_url}): {why}. By hand: {by_hand}") from error
    return dest


class _Transfer:
    """Download ``url`` to ``part`` in one or more attempts."""

    def __init__(
        self, url: str, part: Path, timeout: float, connect_timeout: float, max_bytes: int, pace: _Pace
    ) -> None:
        self.url, self.part, self.timeout, self.connect_timeout = url, part, timeout, connect_timeout
        self.max_bytes, self.pace = max_bytes, pace
        self.version: str | None = None  # sent as If-Range: the version of the file that the part belongs to

    def run(self, bar: Progress, retries: int, pause: float) -> None:
        task = bar.add_task(self.part.stem, total=None, visible=False)  # shown once the server answers
        for left in range(retries, -1, -1):
            try:
                self._attempt(bar, task, again=left < retries)
                return
            except _ConnectionLostError as error:
                if left == 0:
                    kept = f"; run it again to resume from {self.part}" if self.part.exists() else ""
                    raise _FailedError(f"{error}, and {retries} retries did not help{kept}") from error
                logger.info("%s: %s, %d retries left", clean(self.url), error, left)
                time.sleep(pause)

    def _attempt(self, bar: Progress, task: TaskID, again: bool) -> None:
        have = self.part.stat().st_size if self.part.exists() else 0
        request = _request(self.url, have, self.version)
        try:
            response = _open(request, self.timeout, self.connect_timeout)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
                raise _FailedError(f"the server answered {error.code} {clean(str(error.reason))}") from error
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return  # the part is complete, only the rename was missing
            self.part.unlink()
            raise _ConnectionLostError(f"the server's file is not longer than the {have} bytes of the part") from error
        except NETWORK_ERRORS as error:
            why = f"no connection ({clean(str(getattr(error, 'reason', None) or error))})"
            raise (_ConnectionLostError if again else _FailedError)(why) from error
        with contextlib.closing(response), self.pace.watching(response):
            self._receive(response, have, bar, task)

    def _receive(self, response: http.client.HTTPResponse, have: int, bar: Progress, task: TaskID) -> None:
        headers, total = response.headers, None
        if response.status == http.HTTPStatus.PARTIAL_CONTENT:
            if not have:
                raise _FailedError("the server sent a part of the file (206), although all of it was requested")
            if not (headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
                self.part.unlink()
                raise _ConnectionLostError("the server sent another range than requested")
        elif response.status != http.HTTPStatus.OK:
            raise _FailedError(f"the server answered {response.status} {clean(response.reason)}")
        else:
            have = 0  # the whole file follows: the server does not support ranges, or the file has changed
        if re.fullmatch(r"[0-9]+", length := headers.get("Content-Length") or ""):
            total = have + int(length[:20])  # Python refuses to read very long numbers; 20 digits are too many anyway
            self._check_size(total)
        etag = headers.get("ETag")  # a weak one (W/...) does not guarantee equal bytes
        self.version = etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")
        bar.update(task, total=total, completed=have, visible=True)
        with open(self.part, "ab" if have else "wb") as file:
            while chunk := self._read(response):
                have += len(chunk)
                self._check_size(have)
                file.write(chunk)
                bar.update(task, completed=have)
        if total is not None and have != total:
            raise _ConnectionLostError(f"the connection ended after {have} of {total} bytes")

    def _check_size(self, size: int) -> None:
        """Give up, and delete the part, if the file has more than ``max_bytes``."""
        if size > self.max_bytes:
            self.part.unlink(missing_ok=True)
            raise _FailedError(f"the server sends more than {self.max_bytes} bytes, the most that the file can have")

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            chunk = response.read1(CHUNK)  # return what has arrived: waiting for a full chunk could lose it
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a damaged length of a chunk
            self.pace.check()
            raise _ConnectionLostError(f"the connection was lost ({clean(str(error))})") from error
        self.pace.check()
        self.pace.received += len(chunk)
        return chunk


class _Pace:
    """Cut a connection that brings fewer than ``slowest`` bytes per second over ``window`` seconds.

    A thread watches, because a read does not return while a server sends a byte of a header now and then.
    """

    def __init__(self, slowest: float, window: float) -> None:
        self.slowest, self.window = slowest, window
        self.received, self.too_slow = 0, False

    @contextlib.contextmanager
    def watching(self, response: http.client.HTTPResponse) -> Iterator[None]:
        """Watch ``response`` while it is read. The reader adds what it gets to ``received`` and calls ``check``."""
        self.received, self.too_slow = 0, False
        if response.isclosed():  # an empty body
            yield
            return
        done = threading.Event()
        with socket.socket(fileno=os.dup(response.fileno())) as connection:
            thread = threading.Thread(target=self._watch, args=(connection, done), daemon=True)
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()

    def _watch(self, connection: socket.socket, done: threading.Event) -> None:
        before = 0
        while not done.wait(self.window):
            now = self.received
            if now - before < self.slowest * self.window:
                self.too_slow = True
                with contextlib.suppress(OSError):  # the server has closed it already
                    connection.shutdown(socket.SHUT_RDWR)
                return
            before = now

    def check(self) -> None:
        """Raise _ConnectionLostError if the connection was cut."""
        if self.too_slow:
            raise _ConnectionLostError(
                f"the server sent fewer than {self.slowest:g} bytes per second for {self.window:g} seconds"
            )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to http and https addresses only."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not is_address(newurl):
            fp.close()
        _check_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener for http and https; urllib's own also opens local files and ftp."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        _Redirects,
    ):
        opener.add_handler(handler())
    return opener


def _check_address(url: str) -> None:
    if not is_address(url):
        raise _FailedError(f"{clean(url)} is not an http or https address")


def clean(text: str, limit: int = 200) -> str:
    """Return text of a server for a message: short, and without characters that control a terminal."""
    text = text if len(text) <= limit else text[:limit] + "..."
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def _request(url: str, have: int, version: str | None) -> urllib.request.Request:
    headers = {"User-Agent": "mtl", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if version:
            headers["If-Range"] = version
    try:
        return urllib.request.Request(url, headers=headers)
    except ValueError as error:
        raise _FailedError(str(error)) from error


def _open(request: urllib.request.Request, timeout: float, limit: float) -> http.client.HTTPResponse:
    """Return the response to ``request``; raise urllib's errors, or TimeoutError after ``limit`` seconds.

    The request runs in a thread, because urllib's timeout does not cover the name look-up and applies to each of a
    host's addresses separately.
    """
    answers: list[http.client.HTTPResponse] = []
    errors: list[BaseException] = []
    abandoned = threading.Event()

    def ask() -> None:
        try:
            answers.append(_opener().open(request, timeout=timeout))
            if abandoned.is_set():
                answers[0].close()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit)
    if errors:
        raise errors[0]
    if not answers:
        abandoned.set()
        raise TimeoutError(f"no answer within {limit:g} seconds")
    return answers[0]


def _mismatch(path: Path, checksums: dict[str, str | None]) -> str | None:
    """Return a message if a checksum of ``path`` is wrong, else None."""
    for name, expected in checksums.items():
        if expected is not None:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, partial(hashlib.new, name, usedforsecurity=False))
            if digest.hexdigest() != expected.lower():
                return f"its {name} is {digest.hexdigest()}, expected {expected}"
    return None


def _bar(visible: bool) -> Progress:
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not visible)
