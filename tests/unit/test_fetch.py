"""Downloads from a local server that misbehaves on demand, and archives: a file is complete or absent."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import random
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mtl.data_modules.files import download, reading
from mtl.data_modules.files.download import fetch, move_missing, unpacked

from mtl.checks import InputError

CONTENT = bytes(i * 31 % 251 for i in range(300_000))
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Site:
    """What the server serves and how it behaves; ``requests`` counts the requests that it received."""

    url: str = ""
    content: bytes = CONTENT
    status: int = 200
    cuts: list[int] = field(default_factory=list)  # bytes sent of each next answer before the connection is closed
    reason: str | None = None  # reason phrase
    location: str | None = None  # address to which requests are redirected
    requests: int = 0


def handler_of(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            site.requests += 1
            body = b"" if site.status >= 400 else site.content
            self.send_response(302 if site.location else site.status, site.reason)
            if site.location:
                self.send_header("Location", site.location)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: site.cuts.pop(0)] if site.cuts else body)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@contextlib.contextmanager
def serve(site: Site) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(site)) as server:
        site.url = f"http://127.0.0.1:{server.server_port}/file.zip"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with serve(site):
        yield site


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "data" / "file.zip"


def get(site: Site, dest: Path, known_hash: str | None = SHA256) -> bytes:
    """Fetch and return the content; check that no other file is left."""
    fetch(site.url, dest, known_hash)
    assert files(dest.parent) == [dest.name]
    return dest.read_bytes()


def files(folder: Path) -> list[str]:
    """Return the names of the files in ``folder``, apart from locks."""
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("known_hash", [SHA256, f"md5:{hashlib.md5(CONTENT).hexdigest()}", None])
def test_file_is_fetched_once(site: Site, dest: Path, known_hash: str | None) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda _: get(site, dest, known_hash), range(3))] == [CONTENT] * 3
    assert site.requests == 1
    if known_hash is not None:
        dest.write_bytes(b"half")
        assert get(site, dest, known_hash) == CONTENT
    first, dest = Site(location=site.url), dest.with_name("moved.zip")
    with serve(first):
        fetch(first.url, dest, known_hash)
    assert dest.read_bytes() == CONTENT


def test_lost_connection_is_tried_again(site: Site, dest: Path) -> None:
    site.cuts = [100_000, 150_000]
    assert get(site, dest) == CONTENT
    assert site.requests == 3


def test_connection_lost_on_every_retry(site: Site, dest: Path) -> None:
    site.cuts = [100_000] + [1] * download.RETRIES
    with pytest.raises(InputError, match=r"cannot download file\.zip: .*Without the network, get http"):
        get(site, dest)
    assert site.requests == 1 + download.RETRIES
    assert files(dest.parent) == []


def test_wrong_hash(site: Site, dest: Path) -> None:
    with pytest.raises(InputError, match=r"cannot download file\.zip: '.*hash of downloaded file"):
        get(site, dest, "0" * 64)
    assert files(dest.parent) == []


def test_silent_server_is_a_lost_connection(dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT", (0.1, 0.1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/file.zip"
        with pytest.raises(InputError, match=r"cannot download file\.zip: .*timed out"):
            fetch(url, dest, SHA256)


def test_file_missing_on_the_server(site: Site, dest: Path) -> None:
    site.status, site.reason = 404, "\x1b[31mred" + "y" * 1000
    with pytest.raises(InputError, match=r"cannot download file\.zip: '404 Client Error: \\x1b\[31mredy") as caught:
        get(site, dest)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    assert files(dest.parent) == []


def test_no_network_is_one_sentence(dest: Path) -> None:
    host = "127.0.0.1:9"
    message = f"cannot download file.zip: .*get http://{host}/file.zip elsewhere and put it at {dest}.*paths.data_dir"
    with pytest.raises(InputError, match=message) as caught:
        fetch(f"http://{host}/file.zip", dest, SHA256)
    assert ": Connection refused. " in str(caught.value)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://"])
def test_other_addresses_are_not_fetched(dest: Path, site: Site, url: str) -> None:
    with pytest.raises((InputError, ValueError), match=r"cannot download|Unrecognized URL|Invalid"):
        fetch(url, dest, SHA256)
    site.location = url
    with pytest.raises(InputError, match="cannot download"):
        get(site, dest)
    assert not dest.exists()


def make_zip(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def unpack(archive: Path) -> None:
    with unpacked(archive) as content:
        move_missing(content, archive.parent)


def test_zip_adds_missing_files_and_keeps_existing_ones(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x", "a/b/y.txt": "y", "c/z.txt": "z"})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("mine")
    (tmp_path / ".a.zip.unpacked" / "c").mkdir(parents=True)  # left by a killed process
    (tmp_path / ".a.zip.unpacked" / "c" / "half.txt").write_text("half")
    unpack(archive)
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.txt")}
    assert files == {"a/x.txt": "mine", "a/b/y.txt": "y", "c/z.txt": "z"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.zip", "c"]


@pytest.mark.parametrize("name", ["../out.txt", "/out.txt", "C:\\out.txt"])
def test_no_member_leaves_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "here").mkdir()
    archive = make_zip(tmp_path / "here" / "a.zip", {"a/x.txt": "x", name: "bad"})
    with contextlib.suppress(InputError):
        unpack(archive)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert not Path("/out.txt").exists()


@pytest.mark.parametrize("name", ["../out.txt", "/out.txt", "a/../../out.txt", "link/out.txt"])
def test_no_member_of_a_tar_leaves_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "here").mkdir()
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
    with tarfile.open(tmp_path / "here" / "a.tar.gz", "w:gz") as archive:
        archive.addfile(link)
        for member in (tarfile.TarInfo("a/x.txt"), tarfile.TarInfo(name)):
            archive.addfile(member)
    if name.startswith("link"):
        unpack(tmp_path / "here" / "a.tar.gz")
        assert sorted(files(tmp_path / "here")) == ["a", "a.tar.gz", "link"]
    else:
        with pytest.raises(InputError, match=rf"is damaged \('{name} leaves the folder'\)"):
            unpack(tmp_path / "here" / "a.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert not Path("/out.txt").exists()


def test_bombs_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "HARMLESS_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("zeros", bytes(1 << 21))
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for name in "ab":
            member = tarfile.TarInfo(name)
            member.size = 1 << 20
            tar.addfile(member, io.BytesIO(bytes(1 << 20)))
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(1 << 21)))
    for name in ("a.zip", "a.tar.gz", "a.gz"):
        with pytest.raises(InputError, match=rf"{name} holds more than 100 times its [\d,]+ bytes"):
            unpack(tmp_path / name)


def test_every_damage_of_a_zip_gives_one_message(tmp_path: Path) -> None:
    raw = make_zip(tmp_path / "a.zip", {"a/x.txt": "x" * 100, "b.txt": "y"}).read_bytes()
    chance, messages = random.Random(0), []
    damages = [raw[:-30], b"<html>", b""]
    damages += [raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :] for at in range(len(raw))]
    for content in damages:
        (tmp_path / "a.zip").write_bytes(content)
        try:
            with unpacked(tmp_path / "a.zip"):
                pass
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert all("a.zip" in message and "\n" not in message for message in messages)
    assert messages[0].endswith(
        "is damaged ('File is not a zip file'): delete it and start again to fetch it once more"
    )
