"""A PostgreSQL server of its own, on a socket in a folder."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.letter_embeddings import LetterEmbeddings


class PostgresServer:
    """A server in a folder that user postgres may write to; ``start`` after ``kill`` finds its data again."""

    def __init__(self, tools: Path, folder: Path) -> None:
        as_postgres = ["runuser", "-u", "postgres", "--"]
        subprocess.run(["install", "-d", "-o", "postgres", folder], check=True)
        subprocess.run([*as_postgres, tools / "initdb", "-D", folder / "data", "-A", "trust", "-N"], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        self.url = f"postgresql+psycopg://postgres@/postgres?host={folder}"
        self._options = f"-k {folder} -c listen_addresses= -c fsync=off"
        self._control = [*as_postgres, tools / "pg_ctl", "-D", folder / "data", "-w", "-l", folder / "log"]

    def start(self) -> None:
        subprocess.run([*self._control, "-o", self._options, "start"], check=True, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """End it at once: open connections break, and what was not committed is lost."""
        subprocess.run([*self._control, "-m", "immediate", "stop"], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def postgres() -> Iterator[PostgresServer]:
    """Run PostgreSQL from the path, or Debian's; skip without one."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    program = shutil.which("postgres") or (programs[-1] if programs else None)
    if program is None or shutil.which("runuser") is None:
        pytest.skip("PostgreSQL or runuser is not installed")
    tools, folder = Path(program).resolve().parent, Path(f"/tmp/rag-posfix-pg-{uuid.uuid4().hex[:9]}")
    server = PostgresServer(tools, folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)


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
