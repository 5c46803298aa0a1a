"""Downloads from a local server that drops connections, refuses and misbehaves on demand."""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mtl.data_modules.files.download import fetch

from mtl.checks import InputError
from tests.file_server import serving

CONTENT = bytes(i * 31 % 251 for i in range(300_000))
MD5 = hashlib.md5(CONTENT).hexdigest()


@dataclass
class Site:
    """What the server serves and how it behaves; ``requests`` lists the Range and If-Range headers it received."""

    url: str = ""
    content: bytes = CONTENT
    ranges: bool = True
    status: int = 200
    etag: str | None = None
    length: bool = True
    cuts: list[int] = field(default_factory=list)  # bytes sent of each next answer before the connection is closed
    stall: float = 0.0  # seconds without data before such a connection is closed
    shift: int = 0  # offset between the requested range and the one sent
    reason: str | None = None  # reason phrase
    declared: str | None = None  # Content-Length, if another one than the right one
    location: str | None = None  # address to which requests are redirected
    drips: bool = False  # send a byte now and then, until the connection is closed
    requests: list[tuple[str | None, str | None]] = field(default_factory=list)


def handler_of(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            asked, version = self.headers["Range"], self.headers["If-Range"]
            site.requests.append((asked, version))
            start, status = 0, site.status
            if asked and site.ranges and version in (None, site.etag):
                start, status = int(asked.removeprefix("bytes=").removesuffix("-")) + site.shift, 206
            if start >= len(site.content):
                status = 416
            body = b"" if status >= 400 else site.content[start:]
            if site.location:
                self.send_response(302)
                self.send_header("Location", site.location)
                self.end_headers()
                return
            self.send_response(status, site.reason)
            if status == 416:
                self.send_header("Content-Range", f"bytes */{len(site.content)}")
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{len(site.content) - 1}/{len(site.content)}")
            if site.etag:
                self.send_header("ETag", site.etag)
            if site.length:
                self.send_header("Content-Length", site.declared or str(len(body)))
            self.end_headers()
            if site.drips:
                self.drip()
                return
            if site.cuts:
                self.wfile.write(body[: site.cuts.pop(0)])
                self.wfile.flush()
                time.sleep(site.stall)
            else:
                self.wfile.write(body)

        def drip(self) -> None:
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.02)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(site)) as server:
        site.url = f"http://127.0.0.1:{server.server_port}/file.zip"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        server.shutdown()
        thread.join()


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "data" / "file.zip"


def get(site: Site, dest: Path, **kwargs: Any) -> bytes:
    """Fetch and return the content; check that no other file is left."""
    assert fetch(site.url, dest, **{"md5": MD5, "pause": 0.0, "progress": False} | kwargs) == dest
    assert [path.name for path in dest.parent.iterdir()] == [dest.name]
    return dest.read_bytes()


def leave_part(dest: Path, content: bytes) -> Path:
    dest.parent.mkdir()
    part = dest.with_name(dest.name + ".part")
    part.write_bytes(content)
    return part


def test_complete_file_and_progress_bar_on_stderr(site: Site, dest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert get(site, dest, progress=True, sha256=hashlib.sha256(CONTENT).hexdigest()) == CONTENT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "file.zip" in captured.err


def test_existing_file_is_not_fetched_again(site: Site, dest: Path) -> None:
    get(site, dest)
    get(site, dest)
    assert len(site.requests) == 1


def test_file_with_a_wrong_checksum_is_replaced(site: Site, dest: Path) -> None:
    dest.parent.mkdir()
    dest.write_bytes(b"half")
    assert get(site, dest) == CONTENT


def test_part_is_resumed(site: Site, dest: Path) -> None:
    leave_part(dest, CONTENT[:1000])
    assert get(site, dest) == CONTENT
    assert site.requests == [("bytes=1000-", None)]


def test_complete_part_is_only_renamed(site: Site, dest: Path) -> None:
    leave_part(dest, CONTENT)
    assert get(site, dest) == CONTENT
    assert len(site.requests) == 1


def test_part_longer_than_the_file_is_discarded(site: Site, dest: Path) -> None:
    leave_part(dest, CONTENT + b"more")
    assert get(site, dest) == CONTENT


def test_part_of_another_file_is_discarded(site: Site, dest: Path) -> None:
    leave_part(dest, b"x" * 1000)
    assert get(site, dest) == CONTENT
    assert site.requests == [("bytes=1000-", None), (None, None)]


@pytest.mark.parametrize("length", [True, False])
def test_server_without_ranges_sends_the_whole_file(site: Site, dest: Path, length: bool) -> None:
    site.ranges, site.length = False, length
    leave_part(dest, CONTENT[:1000])
    assert get(site, dest) == CONTENT


def test_wrong_range_from_the_server_starts_over(site: Site, dest: Path) -> None:
    site.shift = 5
    leave_part(dest, CONTENT[:1000])
    assert get(site, dest) == CONTENT


def test_lost_connection_resumes_after_the_bytes_received(site: Site, dest: Path) -> None:
    site.cuts, site.etag = [50_000, 100_000], '"v1"'
    assert get(site, dest) == CONTENT
    assert site.requests == [(None, None), ("bytes=50000-", '"v1"'), ("bytes=150000-", '"v1"')]


def test_file_that_changes_between_attempts_is_not_mixed(site: Site, dest: Path, monkeypatch: Any) -> None:
    site.cuts, site.etag, new = [50_000], '"v1"', CONTENT[::-1]

    def change(seconds: float) -> None:
        site.content, site.etag = new, '"v2"'

    monkeypatch.setattr(time, "sleep", change)
    assert get(site, dest, md5=None) == new


def test_connection_lost_on_every_retry_keeps_the_part(site: Site, dest: Path) -> None:
    site.cuts = [10, 10, 10]
    with pytest.raises(
        InputError,
        match=r"ended after 30 of 300000 bytes, and 2 retries .*; run it again to resume from .*\.part",
    ):
        get(site, dest, retries=2)
    assert dest.with_name("file.zip.part").read_bytes() == CONTENT[:30]
    assert get(site, dest) == CONTENT


def test_no_data_for_too_long_is_a_lost_connection(site: Site, dest: Path) -> None:
    site.cuts, site.stall = [50_000], 0.4
    assert get(site, dest, timeout=0.1) == CONTENT
    assert site.requests == [(None, None), ("bytes=50000-", None)]


def test_server_that_never_answers(dest: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/file.zip"
        with pytest.raises(InputError, match=r"no answer within 0\.1 seconds"):
            fetch(url, dest, timeout=0.3, connect_timeout=0.1, progress=False)
        time.sleep(0.3)  # until the thread of the request has ended by its own timeout


def test_wrong_checksum_deletes_the_part(site: Site, dest: Path) -> None:
    with pytest.raises(InputError) as caught:
        get(site, dest, md5="0" * 32)
    assert f"its md5 is {MD5}, expected 000" in str(caught.value)
    assert list(dest.parent.iterdir()) == []


def test_file_missing_on_the_server(site: Site, dest: Path) -> None:
    site.status = 404
    with pytest.raises(InputError) as caught:
        get(site, dest, by_hand="copy it from the shelf")
    assert str(caught.value) == (
        f"cannot download file.zip from {site.url}: the server answered 404 Not Found. "
        "Without the network: copy it from the shelf"
    )
    assert len(site.requests) == 1


def test_refused_connection_says_where_to_put_the_file(dest: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(InputError, match=f"no connection .*refused.*put the file at {re.escape(str(dest))}"):
        fetch(f"http://127.0.0.1:{port}/file.zip", dest, progress=False)
    assert time.monotonic() - start < 2


def test_hanging_name_look_up_times_out(dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(0.5) or [])
    with pytest.raises(InputError, match=r"no connection \(no answer within 0\.1 seconds\)"):
        fetch("http://nowhere.invalid/file.zip", dest, connect_timeout=0.1, progress=False)
    time.sleep(0.5)


def test_declared_size_over_the_limit_is_refused_at_once(site: Site, dest: Path) -> None:
    with pytest.raises(InputError, match=r"the server sends more than 299999 bytes, the most that the file can have"):
        get(site, dest, max_bytes=len(CONTENT) - 1)
    assert list(dest.parent.iterdir()) == []
    assert len(site.requests) == 1
    assert get(site, dest, max_bytes=len(CONTENT)) == CONTENT


def test_stream_over_the_limit_stops(site: Site, dest: Path) -> None:
    site.length = False
    with pytest.raises(InputError, match=r"the server sends more than 100000 bytes"):
        get(site, dest, max_bytes=100_000)
    assert list(dest.parent.iterdir()) == []


def test_declared_size_of_thousands_of_digits_is_refused(site: Site, dest: Path) -> None:
    site.declared = "9" * 5000
    with pytest.raises(InputError, match=r"the server sends more than"):
        get(site, dest)


def test_resumed_file_over_the_limit_is_refused(site: Site, dest: Path) -> None:
    leave_part(dest, CONTENT[:1000])
    with pytest.raises(InputError, match=r"the server sends more than 2000 bytes"):
        get(site, dest, max_bytes=2000)
    assert list(dest.parent.iterdir()) == []


def test_server_that_sends_a_byte_now_and_then_is_given_up(site: Site, dest: Path) -> None:
    """The server never ends, so the outcome does not depend on time; the window only has to be short."""
    site.drips = True
    message = r"the server sent fewer than 1e\+06 bytes per second for 0\.1 seconds, and 1 retries did not help"
    with pytest.raises(InputError, match=message):
        get(site, dest, slowest=1e6, window=0.1, retries=1)
    assert len(site.requests) == 2


def test_part_that_was_not_requested_is_refused(site: Site, dest: Path) -> None:
    site.status = 206
    with pytest.raises(
        InputError, match=r"the server sent a part of the file \(206\), although all of it was requested"
    ):
        get(site, dest)
    assert list(dest.parent.iterdir()) == []


def test_answer_other_than_ok_is_refused(site: Site, dest: Path) -> None:
    site.status = 203
    with pytest.raises(InputError, match=r"the server answered 203 Non-Authoritative Information"):
        get(site, dest)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/a", "data:,x", "http://", "gopher://a"])
def test_redirect_to_another_kind_of_address_is_refused(site: Site, dest: Path, location: str) -> None:
    site.location = location
    with pytest.raises(InputError, match=r"cannot download file\.zip from http.*"):
        get(site, dest, md5=None)
    assert list(dest.parent.iterdir()) == []


def test_redirects_to_http_are_followed(site: Site, dest: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file.zip").write_bytes(CONTENT)
    with serving(tmp_path / "other") as url:
        site.location = f"{url}/file.zip"
        assert get(site, dest) == CONTENT


def test_text_of_the_server_is_escaped_and_shortened(site: Site, dest: Path) -> None:
    site.status, site.reason = 500, "\x1b[31mred\x07 [bold]" + "y" * 1000
    with pytest.raises(InputError) as caught:
        get(site, dest)
    message = str(caught.value)
    assert message.isprintable()
    assert r"answered 500 \x1b[31mred\x07 [bold]yyy" in message
    assert "y" * 200 not in message


def test_names_in_the_progress_bar_are_not_taken_for_markup(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    get(site, tmp_path / "data" / "a [red].zip", progress=True)
    assert "a [red].zip" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["no-url", "http://ho st/file.zip", "gopher://host/file.zip", "file:///etc/passwd"])
def test_unusable_url(dest: Path, url: str) -> None:
    with pytest.raises(InputError, match="cannot download"):
        fetch(url, dest, progress=False)


def test_folder_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file, not a folder")
    with pytest.raises(InputError, match=r"cannot write .*data/file\.zip\.part"):
        fetch(site.url, tmp_path / "data" / "file.zip", progress=False)
