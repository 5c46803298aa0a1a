"""Unpacking of zip archives: missing files only, nothing outside the folder, nothing of a damaged archive."""

from __future__ import annotations

import contextlib
import gzip
import random
import zipfile
from pathlib import Path

import pytest
from mtl.data_modules.files import archive as archive_module
from mtl.data_modules.files.archive import extract_gzip, extract_zip

from mtl.checks import InputError


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


def test_zip_adds_missing_files_and_keeps_existing_ones(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x", "a/b/y.txt": "y"})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("mine")
    extract_zip(archive, tmp_path)
    assert (tmp_path / "a" / "x.txt").read_text() == "mine"
    assert (tmp_path / "a" / "b" / "y.txt").read_text() == "y"


def test_unpacked_zip_is_not_unpacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x"})
    extract_zip(archive, tmp_path)
    monkeypatch.setattr(archive_module, "_unpack", pytest.fail)
    extract_zip(archive, tmp_path)


@pytest.mark.parametrize("name", ["../out.txt", "/out.txt", "a/../../out.txt", "C:\\out.txt"])
def test_zip_with_a_path_out_of_it_is_refused(tmp_path: Path, name: str) -> None:
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x", name: "bad"})
    with pytest.raises(InputError, match="leads out of the archive; delete"):
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


@pytest.mark.parametrize("name", [".", "./"])
def test_zip_with_a_member_without_a_name_is_refused(tmp_path: Path, name: str) -> None:
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x"})
    with zipfile.ZipFile(archive, "a") as content:
        info = zipfile.ZipInfo("b")
        info.filename = name.rstrip("/")
        content.writestr(info, "bad")
    with pytest.raises(InputError, match="leads out of the archive; delete"):
        extract_zip(archive, tmp_path / "here")


def test_zip_that_declares_more_than_expected_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x" * 600, "a/y.txt": "y" * 600})
    with pytest.raises(InputError, match=r"a\.zip declares 2 files of 1200 bytes, more than the 1000 bytes"):
        extract_zip(archive, tmp_path / "here", max_bytes=1000)
    assert not (tmp_path / "here").exists()


def test_zip_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "MAX_FILES", 1)
    archive = make_zip(tmp_path / "a.zip", {"a/x.txt": "x", "a/y.txt": "y"})
    with pytest.raises(InputError, match=r"a\.zip declares 2 files"):
        extract_zip(archive, tmp_path / "here")


def test_every_damage_of_a_zip_gives_one_message(tmp_path: Path) -> None:
    raw = make_zip(tmp_path / "a.zip", {"a/x.txt": "x" * 100, "b.txt": "y"}).read_bytes()
    random_bytes = random.Random(0)
    for index in range(len(raw)):
        damaged = raw[:index] + bytes([random_bytes.randrange(256)]) + raw[index + 1 :]
        archive = tmp_path / "a.zip"
        archive.write_bytes(damaged)
        with contextlib.suppress(InputError):
            extract_zip(archive, tmp_path / f"here{index}")


def test_gzip_that_unpacks_to_more_than_expected_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "a.gz"
    archive.write_bytes(gzip.compress(bytes(5000)))
    with pytest.raises(InputError, match=r"a\.gz unpacks to more than 1000 bytes"):
        extract_gzip(archive, tmp_path / "a", max_bytes=1000)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gz"]
    extract_gzip(archive, tmp_path / "a", max_bytes=5000)
    assert (tmp_path / "a").read_bytes() == bytes(5000)
