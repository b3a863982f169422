"""Settings of the whole test run. Weights are found without the network; nothing here loads a model."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

# Read by their libraries at import, so before anything imports them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

import pytest
from hypothesis import HealthCheck, settings

from tests.support.budget import drawn_order
from tests.support.budget import pytest_addoption as pytest_addoption
from tests.support.budget import pytest_runtest_call as pytest_runtest_call
from tests.support.warm_python import WarmPython, warm_python

# No limits of time: the first example of a test pays for imports. On a CI machine examples are the same in every run.
settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests come first: at the end, when a worker waits for the other, files are short."""
    seed = config.getoption("order_seed", None)
    if seed is not None:
        items[:] = drawn_order(items, seed)
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _settings_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A developer's own RAG_POSFIX_ variables, keys and collections change no test, and no fixture of many tests."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as environment:
        for name in list(os.environ):
            if name.upper().startswith("RAG_POSFIX_"):
                environment.delenv(name)
        environment.setenv("RAG_POSFIX_SERVICE_DATA_DIR", str(folder / "shared"))
        environment.setenv("RAG_POSFIX_MODEL", "smollm2")  # whatever the developer has fetched
        yield folder
    assert not (folder / "shared").exists(), "a fixture of many tests wrote keys or collections where others read"


@pytest.fixture(autouse=True)
def _own_data(monkeypatch: pytest.MonkeyPatch, _settings_folder: Path) -> None:
    """The keys that a service of a test creates are not those of the next test."""
    monkeypatch.setenv("RAG_POSFIX_SERVICE_DATA_DIR", str(_settings_folder / uuid4().hex))


@pytest.fixture(autouse=True)
def _own_log_level() -> Iterator[None]:
    """A service or command that a test starts in this process leaves the level of the log as it was."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Starts commands and services in a process of their own without importing torch and transformers for each."""
    with warm_python(tmp_path_factory.mktemp("python")) as python:
        yield python


@pytest.fixture(scope="session")
def engine():
    """The packaged SmolLM2, converted into the user's cache on first use, with the attention hook on it."""
    from rag_posfix.generation.load import load_engine

    return load_engine()


@pytest.fixture(scope="session")
def float32_engine(engine):
    """The same in float32, whatever ``auto`` chooses on this machine."""
    import torch

    from rag_posfix.generation.load import load_engine

    return engine if engine.loaded.model.dtype == torch.float32 else load_engine(dtype="float32")
