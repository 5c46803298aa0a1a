"""Fetch from a server in a thread that cuts, refuses and misbehaves on demand."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from data_modules.files import archive as archive_module
from data_modules.files.archive import extract_zip
from data_modules.files.download import fetch
from mtl.types import InputError

CONTENT = bytes(i * 31 % 251 for i in range(300_000))
MD5 = hashlib.md5(CONTENT).hexdigest()


@dataclass
class Site:
    """What the server serves, and how it behaves; ``requests`` are the Range and If-Range headers it got."""

    url: str = ""
    content: bytes = CONTENT
    ranges: bool = True
    status: int = 200
    etag: str | None = None
    length: bool = True
    cuts: list[int] = field(default_factory=list)  # bytes to send of the next answers before the connection ends
    stall: float = 0.0  # seconds of silence after a cut, before the connection ends
    shift: int = 0  # how far off a range it answers with
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
            self.send_response(status)
            if status == 416:
                self.send_header("Content-Range", f"bytes */{len(site.content)}")
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{len(site.content) - 1}/{len(site.content)}")
            if site.etag:
                self.send_header("ETag", site.etag)
            if site.length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if site.cuts:
                self.wfile.write(body[: site.cuts.pop(0)])
                self.wfile.flush()
                time.sleep(site.stall)
            else:
                self.wfile.write(body)

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
    """Fetch and return the content; nothing but the file may be left."""
    assert fetch(site.url, dest, **{"md5": MD5, "pause": 0.0, "progress": False} | kwargs) == dest
    assert [path.name for path in dest.parent.iterdir()] == [dest.name]
    return dest.read_bytes()


def leave_part(dest: Path, content: bytes) -> Path:
    dest.parent.mkdir()
    part = dest.with_name(dest.name + ".part")
    part.write_bytes(content)
    return part


def test_whole_file_and_bar_on_stderr(site: Site, dest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert get(site, dest, progress=True, sha256=hashlib.sha256(CONTENT).hexdigest()) == CONTENT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "file.zip" in captured.err


def test_file_that_is_there_is_not_fetched_again(site: Site, dest: Path) -> None:
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


def test_part_longer_than_the_file_starts_again(site: Site, dest: Path) -> None:
    leave_part(dest, CONTENT + b"more")
    assert get(site, dest) == CONTENT


def test_part_of_another_file_starts_again(site: Site, dest: Path) -> None:
    leave_part(dest, b"x" * 1000)
    assert get(site, dest) == CONTENT
    assert site.requests == [("bytes=1000-", None), (None, None)]


@pytest.mark.parametrize("length", [True, False])
def test_server_without_ranges_starts_again(site: Site, dest: Path, length: bool) -> None:
    site.ranges, site.length = False, length
    leave_part(dest, CONTENT[:1000])
    assert get(site, dest) == CONTENT


def test_server_with_wrong_range_starts_again(site: Site, dest: Path) -> None:
    site.shift = 5
    leave_part(dest, CONTENT[:1000])
    assert get(site, dest) == CONTENT


def test_cut_connection_goes_on_from_what_arrived(site: Site, dest: Path) -> None:
    site.cuts, site.etag = [50_000, 100_000], '"v1"'
    assert get(site, dest) == CONTENT
    assert site.requests == [(None, None), ("bytes=50000-", '"v1"'), ("bytes=150000-", '"v1"')]


def test_file_that_changes_between_attempts_is_not_mixed(site: Site, dest: Path, monkeypatch: Any) -> None:
    site.cuts, site.etag, new = [50_000], '"v1"', CONTENT[::-1]

    def change(seconds: float) -> None:
        site.content, site.etag = new, '"v2"'

    monkeypatch.setattr(time, "sleep", change)
    assert get(site, dest, md5=None) == new


def test_connection_cut_again_and_again_keeps_the_part(site: Site, dest: Path) -> None:
    site.cuts = [10, 10, 10]
    with pytest.raises(InputError, match=r"ended after 30 of 300000 bytes, and 2 retries did not help; run it again"):
        get(site, dest, retries=2)
    assert dest.with_name("file.zip.part").read_bytes() == CONTENT[:30]
    assert get(site, dest) == CONTENT


def test_silence_in_the_middle_is_a_cut(site: Site, dest: Path) -> None:
    site.cuts, site.stall = [50_000], 0.4
    assert get(site, dest, timeout=0.1) == CONTENT
    assert site.requests == [(None, None), ("bytes=50000-", None)]


def test_server_that_never_answers(dest: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/file.zip"
        with pytest.raises(InputError, match=r"no answer within 0\.1 seconds"):
            fetch(url, dest, timeout=0.3, connect_timeout=0.1, progress=False)
        time.sleep(0.3)  # the thread that asked has ended with its own timeout


def test_wrong_checksum_deletes_the_part(site: Site, dest: Path) -> None:
    with pytest.raises(InputError) as caught:
        get(site, dest, md5="0" * 32)
    assert f"its md5 is {MD5}, expected 000" in str(caught.value)
    assert list(dest.parent.iterdir()) == []


def test_missing_on_the_server(site: Site, dest: Path) -> None:
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


def test_name_look_up_that_hangs_ends(dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(0.5) or [])
    with pytest.raises(InputError, match=r"no connection \(no answer within 0\.1 seconds\)"):
        fetch("http://nowhere.invalid/file.zip", dest, connect_timeout=0.1, progress=False)
    time.sleep(0.5)


@pytest.mark.parametrize("url", ["no-url", "http://ho st/file.zip", "gopher://host/file.zip"])
def test_unusable_url(dest: Path, url: str) -> None:
    with pytest.raises(InputError, match="cannot download"):
        fetch(url, dest, progress=False)


def test_folder_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file, no folder")
    with pytest.raises(InputError, match=r"cannot write .*data/file\.zip\.part"):
        fetch(site.url, tmp_path / "data" / "file.zip", progress=False)


def make_zip(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def test_zip_is_unpacked_and_leftovers_are_removed(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x", "a/b/y.txt": "y", "z.txt": "z"})
    (tmp_path / ".a.zip.99.tmp" / "a").mkdir(parents=True)
    extract_zip(archive, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.zip", "z.txt"]
    assert (tmp_path / "a" / "b" / "y.txt").read_text() == "y"


def test_zip_restores_what_is_missing_and_leaves_the_rest(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x", "a/b/y.txt": "y"})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("mine")
    extract_zip(archive, tmp_path)
    assert (tmp_path / "a" / "x.txt").read_text() == "mine"
    assert (tmp_path / "a" / "b" / "y.txt").read_text() == "y"


def test_zip_that_is_unpacked_already_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x"})
    extract_zip(archive, tmp_path)
    monkeypatch.setattr(archive_module, "_unpack", pytest.fail)
    extract_zip(archive, tmp_path)


@pytest.mark.parametrize("name", ["../out.txt", "/out.txt", "a/../../out.txt", "C:\\out.txt"])
def test_zip_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x", name: "bad"})
    with pytest.raises(InputError, match="outside the archive"):
        extract_zip(archive, tmp_path / "here")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize("damage", ["cut", "flip", "text"])
def test_damaged_zip_says_to_delete_it(tmp_path: Path, damage: str) -> None:
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x" * 1000, "a/y.txt": "y" * 1000})
    raw = bytearray(archive.read_bytes())
    raw[40] ^= 0xFF
    archive.write_bytes({"cut": raw[:-30], "flip": raw, "text": b"<html>"}[damage])
    with pytest.raises(InputError, match=r"a\.zip is damaged .*delete it"):
        extract_zip(archive, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]
