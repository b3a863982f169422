"""A PostgreSQL server of its own, on a socket in a folder.

pytest-postgresql calls pg_ctl as the user of the tests, and PostgreSQL refuses to run as root.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.letter_embeddings import LetterEmbeddings


class PostgresServer:
    """A server in an empty folder; ``start`` after ``kill`` finds its data again. Root runs it as nobody."""

    def __init__(self, tools: Path, folder: Path) -> None:
        self._tools, self._data = tools, folder / "data"
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self.url = f"postgresql+psycopg://postgres@/postgres?host={folder}"
        self._options = f"-k {folder} -c listen_addresses= -c fsync=off"
        self._run("initdb", "-U", "postgres", "-A", "trust", "-N")

    def start(self) -> None:
        self._run("pg_ctl", "-w", "-l", self._data / "log", "-o", self._options, "start")

    def kill(self) -> None:
        """End it at once: open connections break, and what was not committed is lost."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def _run(self, tool: str, *arguments: str | Path) -> None:
        command = [self._tools / tool, "-D", self._data, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", **self._user)


@contextmanager
def postgres() -> Iterator[PostgresServer]:
    """Run PostgreSQL from the path, or Debian's; skip without one, or where this user can run none."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    program = shutil.which("postgres") or (programs[-1] if programs else None)
    if program is None:
        pytest.skip("PostgreSQL is not installed; apt-get install postgresql postgresql-15-pgvector")
    with tempfile.TemporaryDirectory(prefix="rag-posfix-pg-") as folder:
        try:
            server = PostgresServer(Path(program).resolve().parent, Path(folder))
        except (OSError, KeyError, subprocess.SubprocessError) as error:
            pytest.skip(f"PostgreSQL makes no database here: {error}")
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def postgres_server() -> Iterator[str]:
    """Run PostgreSQL and yield its connection string; skip without one."""
    with postgres() as server:
        yield server.url


def pgvector_collection(url: str, documents: list, ids: list[str], embeddings: Any = None) -> None:
    """Make langchain's collection ``docs`` on a server; skips if the server has no pgvector."""
    import sqlalchemy
    from langchain_postgres.vectorstores import PGVector

    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        query = "select 1 from pg_available_extensions where name = 'vector'"
        has_extension = connection.execute(sqlalchemy.text(query)).first() is not None
    engine.dispose()
    if not has_extension:
        pytest.skip("this PostgreSQL has no pgvector")
    store = PGVector.from_documents(
        documents, embeddings or LetterEmbeddings(), connection=url, collection_name="docs", ids=ids
    )
    store.session_maker().get_bind().dispose()
