"""The Dockerfile: its linter, what its stages have and do not have, and its steps outside of a container."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from deployments.ci import image_steps
from deployments.ci.image_steps import DOCKERFILE, Step, below, command_of, read_steps, stages_of, steps_of

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("cpu", "cuda")


@pytest.fixture(scope="module")
def steps():
    return read_steps(DOCKERFILE.read_text("utf-8"))


def of_target(target, steps, instruction):
    """Texts of an instruction in a target and what it is made from."""
    chain = stages_of(target, steps)
    return [step.text for step in steps if step.stage in chain and step.instruction == instruction]


@pytest.fixture(scope="module")
def hadolint():
    found = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
    if found is None:
        pytest.skip("no hadolint: its wheel exists for x86-64 and macOS")
    return found


def lint(hadolint, text):
    config = DOCKERFILE.parent / ".hadolint.yaml"
    return subprocess.run(
        [hadolint, "--config", str(config), "-"], input=text, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_linter_finds_nothing(hadolint):
    done = lint(hadolint, DOCKERFILE.read_text("utf-8"))
    assert (done.stdout, done.returncode) == ("", 0)


def test_the_linter_would_find_a_shell_form_command_and_an_unpinned_package(hadolint):
    text = DOCKERFILE.read_text("utf-8")
    assert "DL3025" in lint(hadolint, text.replace('CMD ["rag-posfix", "serve"]', "CMD rag-posfix serve")).stdout
    assert "DL3008" in lint(hadolint, text.replace("RUN uv venv /app", "RUN apt-get install -y curl")).stdout


def test_base_images_are_pinned_and_uv_is_not_in_the_final_image(steps):
    images = dict(step.text.split("=") for step in steps if step.instruction == "ARG")
    assert re.fullmatch(r"\S+/uv:\d+\.\d+\.\d+", images["UV_IMAGE"])
    assert re.fullmatch(r"\S+/python:3\.\d+-slim-\w+", images["PYTHON_IMAGE"])
    builder, runtime = (
        next(step.text for step in steps if step.instruction == "FROM" and step.stage == stage)
        for stage in ("builder", "runtime")
    )
    assert builder.split()[0] == runtime.split()[0] == "${PYTHON_IMAGE}"
    for target in TARGETS:
        assert not any("/uv" in text for text in of_target(target, steps, "COPY"))


@pytest.mark.parametrize("target", TARGETS)
def test_the_final_image_runs_as_a_numeric_user_with_volumes_for_caches_and_data(target, steps):
    assert of_target(target, steps, "USER") == ["10001:10001"]
    assert of_target(target, steps, "VOLUME") == ['["/cache", "/data"]']
    assert of_target(target, steps, "CMD") == ['["rag-posfix", "serve"]']
    variables = " ".join(of_target(target, steps, "ENV"))
    assert "RAG_POSFIX_CACHE_DIR=/cache" in variables
    assert "RAG_POSFIX_SERVICE_DATA_DIR=/data" in variables
    assert "HOME=/tmp" in variables  # the root is read-only


@pytest.mark.parametrize("target", TARGETS)
def test_readiness_is_asked_with_python_alone(target, steps):
    (check,) = of_target(target, steps, "HEALTHCHECK")
    assert 'CMD ["python", "-c"' in check
    assert "/readyz" in check
    assert "curl" not in check


@pytest.mark.parametrize("target", TARGETS)
def test_no_step_brings_weights_into_the_image(target, steps):
    texts = [step.text for step in steps_of(target, steps)] + of_target(target, steps, "RUN")
    assert not any(word in text for text in texts for word in ("models fetch", "smollm2", "minilm", ".safetensors"))


def test_both_targets_install_the_same_and_differ_in_the_build_of_torch(steps):
    cpu, cuda = (
        [(step.instruction, step.text) for step in steps_of(target, steps) if step.stage != "builder"]
        for target in TARGETS
    )
    assert [step for step in cpu if step not in cuda] == [("ENV", "UV_TORCH_BACKEND=cpu")]
    assert [step for step in cuda if step not in cpu] == []


def test_what_is_copied_is_let_through_by_the_ignore_file(steps):
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    let_through = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        source
        for step in steps
        if step.instruction == "COPY" and not step.text.startswith("--from=")
        for source in step.text.split()[:-1]
    }
    assert copied == let_through
    assert all((ROOT / name).exists() for name in copied)


def test_the_steps_run_in_a_folder_instead_of_a_container(tmp_path, monkeypatch):
    """The real steps take minutes: deployments/ci/image_steps.py cpu --run DIR. Here uv is a script that writes."""
    tools = tmp_path / "tools"
    tools.mkdir()
    uv = tools / "uv"
    uv.write_text('#!/bin/sh\necho "$VIRTUAL_ENV $UV_LINK_MODE $*" >> ../uv.log\nls >> ../uv.log\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    folder = tmp_path / "image"
    assert image_steps.main(["cpu", "--run", str(folder)]) == 0
    log = (folder / "uv.log").read_text("utf-8").splitlines()
    calls = [line.removeprefix(f"{folder}/app copy ") for line in log if line.startswith(str(folder))]
    assert calls[0] == f"venv {folder}/app"
    assert calls[1].startswith("pip install --constraints constraints.txt --requirements pyproject.toml --extra local")
    assert calls[2] == "pip install --no-deps --build-constraints constraints.txt ."
    assert log[-6:] == ["LICENSE", "README.md", "constraints.txt", "pyproject.toml", "rag_posfix", "services"]
    assert not list((folder / "build").rglob("__pycache__"))


def test_a_step_that_fails_ends_the_run(tmp_path, monkeypatch):
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\nexit 3\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SystemExit, match="exit code 3 of: uv venv"):
        image_steps.main(["cpu", "--run", str(tmp_path / "image")])
    with pytest.raises(SystemExit, match="must be empty"):
        image_steps.main(["cpu", "--run", str(tmp_path)])


def test_an_unknown_target_is_refused_with_the_targets_there_are(steps):
    with pytest.raises(SystemExit, match="no target 'gpu'; it has uv, builder"):
        steps_of("gpu", steps)
    with pytest.raises(SystemExit, match="'builder' must copy /app from one stage"):
        steps_of("builder", steps)


def test_continued_lines_and_mounts_are_read():
    text = "# a comment\nFROM a AS b\nRUN --mount=type=cache,target=/x \\\n    uv  pip \\\n    install .\n"
    assert read_steps(text) == [
        Step("b", "FROM", "a AS b"),
        Step("b", "RUN", "--mount=type=cache,target=/x uv pip install ."),
    ]
    assert command_of(read_steps(text)[1]) == "uv pip install ."


def test_only_the_folders_of_the_image_are_moved():
    moved = below(Path("/d"), "uv venv /app; ls /build/x /application /opt/app")
    assert moved == "uv venv /d/app; ls /d/build/x /application /opt/app"
