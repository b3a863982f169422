"""What is refused before a process is started, and what becomes of processes; splitting is an integration test."""

import contextlib
import subprocess
import sys

import psutil
import pytest

from rag_posfix.errors import ConfigError, GenerationError, UnsupportedModelError
from rag_posfix.generation.tensor_parallel import launch as parallel
from rag_posfix.generation.tensor_parallel.launch import load_parallel, run_torchrun_worker
from rag_posfix.generation.tensor_parallel.leader import Processes
from rag_posfix.pipeline.build import launch_environment
from rag_posfix.process import environment_with
from tests.support.tiny import save_tiny
from tests.support.waiting import wait_until

WAIT = ["-c", "import os, sys\nwhile os.read(0, 1): pass"]


def waiting():
    """How many of the processes that this one has started run ``WAIT``."""
    found = 0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            found += child.cmdline()[-2:] == WAIT
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(
        save_tiny(tmp_path_factory.mktemp("tiny"), num_attention_heads=6, num_key_value_heads=6, hidden_size=96)
    )


@pytest.fixture
def nothing_starts(monkeypatch):
    def started(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(Processes, "__init__", started)


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tp": 4}, r"tp=4 .* 6 key/value heads.*; allowed: 1, 2, 3, 6$"),
            ({"tp": 64}, r"tp=64 .* 6 key/value heads.*; allowed: 1, 2, 3, 6$"),
            ({"tp": 1}, "tp=1 must be 2 or more"),
            ({"tp": 2, "timeout_seconds": 0}, "timeout_seconds=0 must be above 0"),
            ({"tp": 2, "model": "/nowhere"}, "'/nowhere' cannot be loaded"),
        ],
    )
    def test_heads_times_and_models_that_cannot_be_split(self, folder, nothing_starts, options, message):
        with pytest.raises(ConfigError, match=message):
            load_parallel(**{"model": folder, "environment": launch_environment(), **options})

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"tp": 2, "device": "cpu"}, "device='cpu'.*tp=2.* use 'auto' or 'cuda'"), ({"tp": 3}, "tp=3 .*2 can")],
    )
    def test_a_device_that_ranks_would_not_compute_on(self, folder, nothing_starts, monkeypatch, options, message):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        with pytest.raises(ConfigError, match=message):
            load_parallel(folder, environment=launch_environment(), **options)

    def test_a_missing_package_by_its_extra(self, folder, nothing_starts, monkeypatch):
        monkeypatch.setattr(parallel, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"accelerate is not installed.*\.\[tp\]"):
            load_parallel(folder, tp=2, environment=launch_environment())

    def test_a_family_that_is_not_supported(self, tmp_path, nothing_starts):
        from transformers import GPT2Config

        GPT2Config().save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModelError, match="model type 'gpt2' is not supported"):
            load_parallel(str(tmp_path), tp=2, environment=launch_environment())

    def test_another_number_than_torchrun_started(self, folder, nothing_starts, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "4")
        for function in (load_parallel, run_torchrun_worker):
            with pytest.raises(ConfigError, match="torchrun started 4 processes and tp=2"):
                function(folder, tp=2, environment=launch_environment())


def test_a_process_that_torchrun_did_not_start_follows_nobody(folder):
    assert run_torchrun_worker(folder, tp=2, environment=launch_environment()) is False


def test_the_first_process_of_torchrun_follows_nobody(folder, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_torchrun_worker(folder, tp=2, environment=launch_environment()) is False


def test_a_process_that_cannot_start_is_told_with_what_it_said(folder, monkeypatch):
    import torch

    monkeypatch.setattr(parallel, "WORKER_MODULE", "rag_posfix.generation.nope")
    with pytest.raises(GenerationError, match=r"over 2 processes: .*rank 1 of 2 ended with exit code 1 .*No module"):
        load_parallel(folder, tp=2, environment=launch_environment())
    assert not torch.distributed.is_initialized()


class TestProcesses:
    def start(self, *commands, **options):
        return Processes(commands, Processes.shared_folder(), environment_with(), **options)

    def test_they_run_until_they_are_closed_and_leave_nothing_behind(self):
        folder = Processes.shared_folder()
        processes = Processes([WAIT, WAIT], folder, environment_with())
        assert processes.failure(0.2) is None
        assert waiting() == 2
        processes.kill()
        processes.close()
        assert processes.failure() is None  # they were ended; that is no failure
        assert not folder.exists()
        assert waiting() == 0

    def test_only_the_user_can_read_what_they_share(self):
        folder = Processes.shared_folder()
        try:
            assert folder.stat().st_mode & 0o777 == 0o700
        finally:
            folder.rmdir()

    def test_one_that_ends_by_itself_ends_the_others_and_its_last_words_are_told(self):
        told = []
        dies = ["-c", "import sys; sys.exit('no room\\n\\n')"]
        processes = self.start(WAIT, dies, on_failure=lambda: told.append(True))
        try:
            assert processes.failure(60) == "the process of rank 2 of 3 ended with exit code 1 (no room)"
            wait_until(lambda: told and not waiting())
            assert told == [True]
        finally:
            processes.close()

    @pytest.mark.slow
    def test_they_end_with_the_process_that_started_them_however_it_ends(self, tmp_path):
        """The pipe that they read is closed then."""
        code = f"""
import os, pathlib, time
from rag_posfix.generation.tensor_parallel.leader import Processes
processes = Processes([{WAIT!r}], pathlib.Path({str(tmp_path)!r}), dict(os.environ))
print("started", flush=True)
time.sleep(60)
"""
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
            assert starter.stdout.readline() == "started\n"
            (started,) = psutil.Process(starter.pid).children()
            starter.kill()
        started.wait(60)
        assert not started.is_running()

    def test_they_find_the_modules_of_this_process_and_know_their_rank(self, monkeypatch, tmp_path):
        (tmp_path / "only_here.py").write_text("")
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
        says = "import os, sys, only_here; sys.exit('rank ' + os.environ['LOCAL_RANK'])"
        processes = self.start(["-c", says])
        try:
            assert processes.failure(60).endswith("(rank 1)")
        finally:
            processes.close()
