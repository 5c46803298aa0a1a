"""Open the storage of a study: SQLite, any database that SQLAlchemy knows, or a journal file."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.pool import NullPool

from mtl.checks import InputError, first_line, require

STUDY = "study.db"  # a storage in the folder of a study
JOURNAL = "journal:"
SQLITE_TIMEOUT_S = 5  # seconds that a worker waits for other workers' writes to an SQLite file
_DAMAGED = "the file is damaged: put a copy of it back, or move it away and begin the study anew"
ADVICE_BY_ERROR = {  # error messages of SQLite and Optuna for which retrying does not help, and advice
    "database is locked": "another program holds the file: end that one, and start the same command again",
    "malformed": _DAMAGED,
    "not a database": _DAMAGED,
    "no longer compatible": "this can be done with a copy of the file",
}
ATTEMPTS = 5  # attempts to open a database in which another worker is creating the tables


def check_study(name: str, address: str | None, folder: Path) -> None:
    """Raise InputError if ``folder``, that of the study ``name``, lacks the storage that ``open_storage`` opens."""
    require(address is not None or (folder / STUDY).exists(), f"study={name}: there is no {folder / STUDY}")


def open_storage(address: str | None, folder: Path, attempt: int = 1) -> BaseStorage:
    """Return the storage at ``address``; None: the file study.db in ``folder``, which is created.

    ``journal:FILE`` is Optuna's JournalStorage in a file; else ``address`` is a URL of SQLAlchemy. Raises InputError if
    it cannot be reached.
    """
    if address is None:
        folder.mkdir(parents=True, exist_ok=True)
        address = f"sqlite:///{folder / STUDY}"
    try:
        if not address.startswith(JOURNAL):
            return _database(address)
        path = Path(address.removeprefix(JOURNAL))
        path.parent.mkdir(parents=True, exist_ok=True)
        return _journal(path)
    except OSError as error:
        raise InputError(f"storage={_without_credentials(address)}: {error}") from None
    except (ImportError, sqlalchemy.exc.ArgumentError) as error:
        accepted = f"accepted are URLs and {JOURNAL}FILE"
        reason = first_line(error.__cause__ or error)
        raise InputError(f"storage={_without_credentials(address)}: {reason}; {accepted}") from None
    except (sqlalchemy.exc.SQLAlchemyError, RuntimeError) as error:
        if attempt == ATTEMPTS or any(text in first_line(error.__cause__ or error) for text in ADVICE_BY_ERROR):
            raise _refused(address, error) from None
    time.sleep(0.2 * attempt)
    return open_storage(address, folder, attempt + 1)


@contextmanager
def opened(address: str | None, folder: Path) -> Iterator[BaseStorage]:
    """Provide the storage, as ``open_storage``; raise InputError if it fails inside the ``with`` block."""
    try:
        yield open_storage(address, folder)
    except (StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise _refused(address or str(folder / STUDY), error) from error


def _refused(address: str, error: BaseException) -> InputError:
    reason = first_line(error.__cause__ or error)
    remedies = [todo for text, todo in ADVICE_BY_ERROR.items() if text in reason]
    [todo, *_] = [*remedies, "start the same command again when it can be reached"]
    return InputError(f"storage={_without_credentials(address)}: {reason}; {todo}")


def _without_credentials(address: str) -> str:
    return re.sub(r"//[^/@]*@", "//", address)


def _journal(path: Path) -> JournalStorage:
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:  # Optuna checks no value
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"storage={JOURNAL}{path}: {reason}; {_DAMAGED}") from error


def _database(address: str) -> RDBStorage:
    # Without a pool, each operation opens its own connection, so none is stale after hours of training
    if not address.startswith("sqlite"):
        return RDBStorage(address, engine_kwargs={"poolclass": NullPool})
    storage = RDBStorage(address, engine_kwargs={"poolclass": NullPool, "connect_args": {"timeout": SQLITE_TIMEOUT_S}})

    # By default SQLite reads before it locks: two workers could both see a waiting trial and take it
    @sqlalchemy.event.listens_for(storage.engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(storage.engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    with storage.engine.begin():  # fail now if another process locks the file
        return storage
