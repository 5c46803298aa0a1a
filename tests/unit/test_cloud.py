"""Tables in the cloud, on a local S3 server: the rows are those of local files, and mistakes are one sentence."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from mtl.data_modules.files.identity import fingerprint
from mtl.data_modules.state import describe_changes
from mtl.data_modules.table import TableDataModule
from polars.testing import assert_frame_equal

import mtl
from mtl.checks import InputError
from mtl.cli.command_line import read_line
from mtl.cli.use import predict
from mtl.files.cloud import CloudPath, path_of
from tests.loaded import loaded
from tests.unit.test_fit import QUICK, visits

server = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")
TASKS: dict[str, Any] = {"clicked": "binary", "minutes": "regression"}
Write = Callable[[str, bytes], None]


@pytest.fixture(scope="module")
def write() -> Iterator[Write]:
    """Return a function that writes an object of the bucket "visits" of a server that the environment names."""
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="visits")
        yield lambda key, content: client.put_object(Bucket="visits", Key=key, Body=content)
        client.close()
    running.stop()


@pytest.fixture(scope="module")
def local(write: Write, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a table in three days, as Parquet, CSV and gzipped CSV, which are in the bucket too."""
    folder, rows = tmp_path_factory.mktemp("visits"), visits(120)
    for day in range(3):
        part, place = rows[day * 40 : (day + 1) * 40], folder / f"day={day}"
        place.mkdir()
        part.write_parquet(place / "rows.parquet")
        part.write_csv(place / "rows.csv")
        (place / "rows.csv.gz").write_bytes(gzip.compress((place / "rows.csv").read_bytes()))
    for file in folder.rglob("*.*"):
        write(str(file.relative_to(folder)), file.read_bytes())
    return folder


def batch_of(path: Path, window_rows: int | None) -> Any:
    data = loaded(TableDataModule(path=path, tasks=TASKS, batch_size=200, window_rows=window_rows))
    return data.spec, next(iter(data.train_dataloader())), data


@pytest.mark.parametrize(
    ("files", "window_rows"),
    [
        ("day=*/*.parquet", None),
        ("day=*/*.parquet", 1 << 20),
        ("day=1/rows.parquet", 1 << 20),
        ("day=*/*.csv", None),
        ("day=*/*.csv.gz", None),
        ("day=2/rows.csv", None),
    ],
)
def test_rows_in_the_cloud_are_those_of_local_files(local: Path, files: str, window_rows: int | None) -> None:
    address = path_of(f"s3://visits/{files}")
    spec, batch, data = batch_of(address, window_rows)
    expected, there, _ = batch_of(local / files, window_rows)
    assert spec == expected
    for found, wanted in ((batch.inputs, there.inputs), (batch.targets, there.targets)):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name].nan_to_num(-9), wanted[name].nan_to_num(-9)) for name in found)
    assert str(data.paths["train"]) == f"s3://visits/{files}"


def test_fit_and_predict_in_the_cloud(
    local: Path, write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    model = mtl.fit("s3://visits/day=*/*.parquet", TASKS, folder=run, **QUICK)
    same = mtl.fit(local / "day=*" / "*.parquet", TASKS, **QUICK)
    assert model.metrics == same.metrics
    for file in ("day=1/rows.parquet", "day=1/rows.csv"):
        out = tmp_path / "out.parquet"
        predict([str(run), f"s3://visits/{file}", "-o", str(out), "--keep", "", "--force"])
        assert_frame_equal(pl.read_parquet(out), model.predict(pl.read_parquet(local / "day=1" / "rows.parquet")))


def test_fingerprint_notices_further_rows_and_files(local: Path, write: Write) -> None:
    address = CloudPath("s3://visits/more/*.parquet")
    content = (local / "day=0" / "rows.parquet").read_bytes()
    write("more/a.parquet", content)
    before = {"data.path": fingerprint(address)}
    assert describe_changes(before, {"data.path": fingerprint(address)}, {"data.path": address}) == {}
    write("more/b.parquet", content)
    found = describe_changes(before, {"data.path": fingerprint(address)}, {"data.path": address})
    there = "data.path=s3://visits/more/*.parquet has changed (80 rows in 2 files, before 40 rows in 1 files)"
    assert found == {"data.path": there}


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://visits/none.parquet", "s3://visits/none.parquet: The specified key does not exist."),
        ("s3://visits/none.csv", "s3://visits/none.csv: The specified key does not exist."),
        ("s3://visits/no*/*.csv", "data.path=s3://visits/no*/*.csv: no file with rows matches this pattern"),
        ("s3://visits/no*/*.parquet", "s3://visits/no*/*.parquet: no file matches this pattern"),
        ("s3://nowhere/*.csv", "s3://nowhere/*.csv: The specified bucket does not exist"),
        ("s3://visits/day=1", "data.path=s3://visits/day=1: in the cloud, give a file or a pattern, as in s3://"),
        ("s3://visits/damaged.parquet", "s3://visits/damaged.parquet: parquet: File out of specification"),
    ],
)
def test_mistake_is_one_sentence(write: Write, address: str, message: str) -> None:
    write("damaged.parquet", b"no table " * 10)
    with pytest.raises(InputError) as caught:
        loaded(TableDataModule(path=path_of(address), tasks=TASKS, batch_size=8))
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "no credentials were found: set AWS_ACCESS_KEY_ID, "),
        ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, "the storage cannot be reached; "),
    ],
)
def test_lack_of_credentials_or_server(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ENDPOINT_URL", "AWS_METADATA_ENDPOINT"):  # where nobody listens
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    address = f"s3://other{len(variables)}/rows.parquet"  # since polars keeps what it knows of a bucket
    with pytest.raises(InputError) as caught:
        loaded(TableDataModule(path=path_of(address), tasks=TASKS, batch_size=8))
    assert str(caught.value).startswith(f"{address}: {message}")


def test_address_on_the_command_line_needs_no_quotes_of_its_own() -> None:
    given = ["data.path=s3://visits/day=*/*.csv", "data.test_path='gs://a/b=1.csv'", "data=table"]
    words = ["data.path='s3://visits/day=*/*.csv'", "data.test_path='gs://a/b=1.csv'", "data=table"]
    assert read_line(given).overrides == words


def test_share_from_python_passes_the_address_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passed: list[str] = []
    monkeypatch.setattr("mtl.sharing.command.share", lambda cfg, run_overrides: None)
    monkeypatch.setattr("mtl.sharing.page.write", lambda comparison, overrides: passed.extend(overrides) or {})
    mtl.share("s3://visits/day=*/*.csv", TASKS, folder=tmp_path)
    [path] = [override for override in read_line(passed).overrides if override.startswith("data.path=")]
    assert path == "data.path='s3://visits/day=*/*.csv'"
