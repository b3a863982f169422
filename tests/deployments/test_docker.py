"""The Dockerfile: its linter, what its stages have and do not have, and its steps outside of a container."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deployments.ci import image_requirements, image_steps
from deployments.ci.image_requirements import EXTRAS, FOLDER, MACHINES, PYTHONS, applies, line_of
from deployments.ci.image_steps import DOCKERFILE, Step, below, command_of, read_steps, stages_of, steps_of

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("cpu", "cuda", "ray")


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
    assert "DL3008" in lint(hadolint, text.replace("RUN groupadd", "RUN apt-get install -y curl && groupadd")).stdout


def test_the_one_base_image_is_pinned_by_its_digest_and_uv_is_not_in_the_final_image(steps):
    images = dict(step.text.split("=") for step in steps if step.instruction == "ARG")
    assert list(images) == ["PYTHON_IMAGE"]
    assert re.fullmatch(r"\S+/python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", images["PYTHON_IMAGE"])
    parents = {step.text.split()[0] for step in steps if step.instruction == "FROM"}
    assert parents - {step.stage for step in steps} == {"${PYTHON_IMAGE}"}
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


def packages_of(target):
    """The lines of a target's lists: version, marker and hashes of each package."""
    packages = {}
    lists = ["cuda", "ray"] if target == "ray" else [target]
    texts = [(FOLDER / f"requirements-{name}.txt").read_text("utf-8") for name in lists]
    for line in "".join(texts).splitlines():
        requirement, *hashes = line.split(" --hash=sha256:")
        parsed = Requirement(requirement)
        assert str(parsed.specifier).startswith("=="), line
        assert hashes, line
        assert all(re.fullmatch(r"[0-9a-f]{64}", each) for each in hashes), line
        packages[parsed.name] = (str(parsed.specifier)[2:], str(parsed.marker or ""), hashes)
    return packages


@pytest.mark.parametrize("target", EXTRAS)
def test_every_package_of_a_target_has_the_version_that_the_tests_ran_with(target):
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    tested = {re.sub(r"[_.]", "-", name): version for name, _, version in (line.partition("==") for line in lines)}
    versions = {name: version for name, (version, *_) in packages_of(target).items()}
    assert {name: version for name, version in versions.items() if tested.get(name, version) != version} == {}
    unknown = set(versions) - set(tested)
    if target not in ("build", "uv"):  # whose tools the tests do not run
        assert {name for name in unknown if not name.startswith(("nvidia-", "cuda-"))} <= {"pip", "triton"}


@pytest.mark.parametrize("target", TARGETS)
def test_the_list_of_a_target_has_what_its_extras_require_on_both_machines(target):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    required = [*project["dependencies"], "pip"]
    for extra in EXTRAS[target]:
        required += project["optional-dependencies"][extra]
    packages = packages_of(target)
    for requirement in map(Requirement, required):
        # torch's CPU build is of torch's own index
        listed = packages_of("torch") if (target, requirement.name) == ("cpu", "torch") else packages
        version, marker, _ = listed[requirement.name]
        assert requirement.specifier.contains(version), requirement
        assert all(applies(marker, python, machine) for python in PYTHONS for machine in MACHINES), requirement


def test_the_service_has_no_ray_and_no_packages_of_the_evaluation_and_ray_alone_none_of_the_latter():
    evaluation = {"matplotlib", "ir-measures", "pytrec-eval-terrier"}
    for target in TARGETS:
        assert not evaluation & set(packages_of(target))
        assert ("ray" in packages_of(target)) == (target == "ray")
        assert {"opentelemetry-sdk", "httpx2", "llguidance", "redis"} <= set(packages_of(target))
    on_cuda = set(packages_of("cuda"))
    left_out = {name for name in on_cuda if name.startswith(image_requirements.NOT_ON_CPU)}
    assert set(packages_of("cpu")) == on_cuda - left_out
    assert {"torch", "triton", "nvidia-cudnn-cu13"} <= left_out


def test_every_step_that_installs_takes_hashes_or_what_was_built_here(steps):
    for target in TARGETS:
        installs = [step.text for step in steps_of(target, steps) if "uv pip install" in step.text]
        listed = [text for text in installs if "--require-hashes" in text]
        assert all("--no-deps" in text for text in installs)
        assert f"--requirements requirements-{target}.txt" in listed[-1]
        assert ("--requirements requirements-torch.txt" in listed[1]) == (target == "cpu")
        assert [text for text in installs if text not in listed and "/build/dist/*.whl" not in text] == []
        assert "cyclonedx-py environment" in installs[-1]
        (of_uv,) = [step.text for step in steps_of(target, steps) if "-m pip install" in step.text]
        assert "--require-hashes --only-binary=:all: --requirement requirements-uv.txt" in of_uv


def test_torchs_cpu_build_has_a_hash_for_each_python_and_machine():
    version, marker, hashes = packages_of("torch")["torch"]
    assert (marker, len(hashes)) == ("", len(PYTHONS) * len(MACHINES))
    wheel = next(Path("/opt/wheels").glob(f"torch-{version}+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"), None)
    assert wheel is None or hashlib.sha256(wheel.read_bytes()).hexdigest() in hashes


def test_a_package_without_a_wheel_for_a_machine_ends_the_run_unless_it_is_not_installed_there():
    def package(*machines, **fields):
        return {"name": "a", "version": "1", "wheels": [
            {"url": f"x/a-1-cp311-abi3-manylinux2014_{machine}.whl", "hashes": {"sha256": machine}}
            for machine in machines
        ], **fields}  # fmt: skip

    assert line_of(package("x86_64", "aarch64")) == "a==1 --hash=sha256:aarch64 --hash=sha256:x86_64"
    with pytest.raises(SystemExit, match=r"a==1 has no wheel for Python 3\.11 on aarch64"):
        line_of(package("x86_64"))
    marker = "platform_machine == 'x86_64'"
    assert line_of(package("x86_64", marker=marker)) == f"a==1 ; {marker} --hash=sha256:x86_64"
    assert line_of(package(marker="sys_platform == 'win32'")) == ""


@pytest.fixture
def uv(monkeypatch):
    monkeypatch.setenv("PATH", f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if shutil.which("uv") is None:
        pytest.skip("no uv here: make setup")


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("target", EXTRAS)
def test_the_index_has_the_wheels_of_every_list(target, machine, uv):
    problems = image_requirements.check(target, (3, 12), machine)
    if "error sending request" in problems:
        pytest.skip("no package index can be reached")
    assert problems == ""


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
    uv.write_text(
        '#!/bin/sh\necho "$VIRTUAL_ENV $UV_LINK_MODE $*" >> ../uv.log\nls >> ../uv.log\n'
        'test "$1" != venv && exit\nmkdir -p "$2/bin"\n'
        'for name in python cyclonedx-py; do ln -s /bin/true "$2/bin/$name"; done\n'
    )
    python = tools / "python"
    python.write_text('#!/bin/sh\ntest "$2" = venv || exit 0\nmkdir -p "$3/bin"\ncp "$0" "$3/bin/python"\n')
    for tool in (uv, python):
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    folder = tmp_path / "image"
    assert image_steps.main(["cpu", "--run", str(folder)]) == 0
    log = (folder / "uv.log").read_text("utf-8").splitlines()
    calls = [line.removeprefix(f"{folder}/app copy ") for line in log if line.startswith(str(folder))]
    assert calls[0] == f"venv {folder}/app"
    assert calls[1] == f"venv {folder}/build/tools"
    assert calls[3] == "pip install --no-deps --require-hashes --requirements requirements-torch.txt"
    assert calls[4] == "pip install --no-deps --require-hashes --requirements requirements-cpu.txt"
    assert calls[5] == f"pip install --no-deps {folder}/build/dist/*.whl"
    assert {"LICENSE", "requirements-build.txt", "requirements-cpu.txt", "requirements-torch.txt", "services"} <= set(
        log
    )
    assert not list((folder / "build").rglob("__pycache__"))


def test_a_step_that_fails_ends_the_run(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SystemExit, match="exit code 3 of: python -m venv"):
        image_steps.main(["cpu", "--run", str(tmp_path / "image")])
    with pytest.raises(SystemExit, match="must be empty"):
        image_steps.main(["cpu", "--run", str(tmp_path)])


def test_an_unknown_target_is_refused_with_the_targets_there_are(steps):
    with pytest.raises(SystemExit, match="no target 'gpu'; it has builder, build-cpu"):
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
