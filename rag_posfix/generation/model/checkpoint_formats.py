"""Checkpoints that need more than transformers' plain loading: GGUF files, and folders with quantised weights.

Both are checked before weights are read. Loads no model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError, missing_extra
from rag_posfix.generation.model.fingerprint import FileDigests

_SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_PART = re.compile(r"-\d{5}-of-(\d{5})$")
_FREQUENCIES = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that scale the rotation."""
_READ_SCALING = frozenset({"gpt-oss", "qwen35", "qwen35moe"})
"""Architectures whose scaling of the rotation transformers reads from GGUF files."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model in a GGUF file of the user. It is converted once, as ``PackagedModel`` is.

    Attributes:
        path: The file.
        sha256: Its digest: another file at the same path is converted anew.
    """

    path: Path
    sha256: str

    @property
    def gguf(self) -> str:
        """Name of the file."""
        return self.path.name

    @property
    def folder_name(self) -> str:
        """Name of the folder for the converted model."""
        return f"{self.path.stem}-{self.sha256[:16]}-bfloat16"

    @property
    def megabytes(self) -> int:
        """Disk space of the converted model, at most: weights of less than 4 bits are rare."""
        return 4 * self.path.stat().st_size // 10**6

    def files(self, cache_dir: Path) -> tuple[Path, ...]:
        """Return the file."""
        return (self.path,)

    @contextmanager
    def whole_file(self, cache_dir: Path) -> Iterator[Path]:
        """Yield the file.

        Raises:
            ConfigError: it is damaged, or transformers would compute another model from it.
        """
        _check_rotation(self.path)
        yield self.path


def read_gguf(model: str, digests: FileDigests) -> GgufFile | None:
    """Return the GGUF file that a model's name is the path of; None for other names.

    Cost: the digest of the file, which is read once.

    Raises:
        ConfigError: there is no such file, it is not a full GGUF file, or ``gguf`` is not installed; or the model is a
            folder with GGUF files and no configuration.
    """
    path = Path(model)
    if path.suffix.lower() != _SUFFIX:
        _refuse_folder(model, path)
        return None
    if not path.is_file():
        raise ConfigError(f"model {model!r} cannot be loaded: there is no such file; give the path of a GGUF file")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"model {model!r} cannot be loaded: it is not a GGUF file; download it again")
    if (part := _PART.search(path.stem)) is not None:
        raise ConfigError(
            f"model {model!r} cannot be loaded: it is one of {int(part[1])} parts; join them with: "
            f"llama-gguf-split --merge FIRST_PART {_PART.sub('', path.stem)}{_SUFFIX}"
        )
    if find_spec("gguf") is None:
        raise missing_extra("gguf", "local")
    (sha256,) = digests.of([path])
    return GgufFile(path.resolve(), sha256)


def _check_rotation(path: Path) -> None:
    """Reject a GGUF file whose rotation is scaled where transformers would leave the scaling out."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
        scales = scaling is not None and scaling.contents() != "none"
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} is damaged ({' '.join(str(error).split())[:100]}); download it again") from error
    scales = scales or any(tensor.name in _FREQUENCIES for tensor in reader.tensors)
    if scales and architecture not in _READ_SCALING:
        raise ConfigError(
            f"model {str(path)!r} cannot be loaded: its rotation is scaled for long prompts, which transformers does "
            f"not read from GGUF files of {architecture}; give the checkpoint it was made from, or {serving(path)}"
        )


def serving(path: Path) -> str:
    """Return how a GGUF file is served, for messages."""
    return (
        f"serve it with llama.cpp: llama-server -m {str(path)!r} --port 8080, and "
        f"model=openai:{path.stem}@http://127.0.0.1:8080/v1"
    )


def _refuse_folder(model: str, folder: Path) -> None:
    """Reject a folder that holds GGUF files and no configuration."""
    try:
        files = [] if (folder / "config.json").exists() else sorted(folder.glob(f"*{_SUFFIX}"))
    except (OSError, ValueError):  # names that no path can have; loading reports them
        return
    if files:
        raise ConfigError(
            f"model {model!r} cannot be loaded: it is a folder of GGUF files; give one of them: {str(files[0])!r}"
        )


_PACKAGES: Mapping[str, Mapping[str, str]] = {
    "aqlm": {"aqlm": "aqlm"},
    "auto-round": {"auto_round": "auto-round"},
    "awq": {"gptqmodel": "gptqmodel"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "eetq": {"kernels": "kernels"},
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "hqq": {"hqq": "hqq"},
    "quanto": {"optimum.quanto": "optimum-quanto"},
    "torchao": {"torchao": "torchao"},
    "vptq": {"vptq": "vptq"},
}
"""Kind of quantisation -> what transformers imports for it: its name in pip."""

_INSTEAD = "give a checkpoint without quantisation, or serve it with vLLM and model=openai:NAME@URL"


def check_quantisation(source: str, config: Any, kinds: Collection[str]) -> None:
    """Reject a quantised checkpoint that transformers cannot read, or that needs packages which are not installed.

    Args:
        source: The model.
        config: Its configuration, with a ``quantization_config``.
        kinds: What transformers reads.

    Raises:
        ConfigError: as above; the message has the command that installs what is missing.
    """
    stated = config.quantization_config
    fields = stated if isinstance(stated, Mapping) else vars(stated)
    kind = fields.get("quant_method")
    kind = str(getattr(kind, "value", kind or ""))
    if not kind and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        kind = "bitsandbytes"
    if kind not in kinds:
        raise ConfigError(
            f"model {source!r} cannot be loaded: transformers does not read its quantization_config {dict(fields)}; "
            f"{_INSTEAD}"
        )
    missing = [name for package, name in _PACKAGES.get(kind, {}).items() if not _is_installed(package)]
    if missing:
        raise ConfigError(
            f"model {source!r} cannot be loaded: its weights are quantised by {kind}, which needs "
            f"{' and '.join(missing)}; run: pip install {' '.join(missing)}; or {_INSTEAD}"
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False
