"""Writes the lists of packages of the image: every package of a target, by version and by the hashes of its wheels.

    python deployments/ci/image_requirements.py          # write deployments/docker/requirements-*.txt anew
    python deployments/ci/image_requirements.py --check  # resolve each list for each machine; downloads none

Needs ``uv`` on the PATH and a package index. Versions come from constraints.txt. A list holds for each promised Python
on x86-64 and arm64; a package without a wheel for one of them ends the run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deployments" / "docker"
SERVICE = (
    "local", "server", "telemetry", "mcp", "remote", "structured", "redis", "pdf", "docx",
    "qdrant", "pgvector", "elasticsearch", "milvus",
)  # fmt: skip
EXTRAS = {"cpu": SERVICE, "cuda": SERVICE, "ray": (*SERVICE, "ray"), "build": (), "uv": (), "torch": ()}
"""Extras of each target. ``build`` and ``uv`` make the package, its SBOM and /app, and are in no image; ``torch`` is
torch's CPU build, of torch's own index, for ``cpu``."""
OTHER_PACKAGES = {"build": ("hatchling", "cyclonedx-bom==7.5.0"), "uv": ("uv",), "torch": ("torch",)}
"""Packages beyond the extras; without an entry pip, which ``rag-posfix models fetch`` runs."""
TORCH_INDEX = {"torch": ("--torch-backend", "cpu")}
PYTHONS = ((3, 11), (3, 12), (3, 13))
MACHINES = ("x86_64", "aarch64")
GLIBC = 36
"""Minor version of glibc 2 of the base image."""
NOT_ON_CPU = ("torch", "triton", "nvidia-", "cuda-")
"""Left out of ``cpu``: torch's CPU build is in torch's own index, in the list ``torch``."""


@cache
def supported_tags(python: tuple[int, int], machine: str) -> set[Tag]:
    """Return the tags of wheels that run in the image."""
    old = {"manylinux2014": ("x86_64", "aarch64"), "manylinux2010": ("x86_64",), "manylinux1": ("x86_64",)}
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 4, -1)]
    platforms += [f"{name}_{machine}" for name, machines in old.items() if machine in machines]
    return {*cpython_tags(python, platforms=platforms), *compatible_tags(python, platforms=platforms)}


def applies(marker: str, python: tuple[int, int], machine: str) -> bool:
    """Return whether a package is installed on this Python and machine."""
    version = "{}.{}".format(*python)
    environment = {
        "python_version": version, "python_full_version": f"{version}.9", "sys_platform": "linux", "os_name": "posix",
        "platform_system": "Linux", "platform_machine": machine, "implementation_name": "cpython",
        "platform_python_implementation": "CPython", "extra": "",
    }  # fmt: skip
    return not marker or Marker(marker).evaluate(environment)


def line_of(package: dict[str, Any]) -> str:
    """Return the line of a package in a list; empty if the image never has it.

    Raises:
        SystemExit: there is no wheel for a Python and a machine that need it.
    """
    name, marker = package["name"], package.get("marker", "")
    targets = [(python, machine) for python in PYTHONS for machine in MACHINES]
    needed = [target for target in targets if applies(marker, *target)]
    wheels = {wheel["url"].rpartition("/")[2]: wheel["hashes"]["sha256"] for wheel in package.get("wheels", ())}
    tags = {file: parse_wheel_filename(file.replace("%2B", "+"))[3] for file in wheels}
    hashes: set[str] = set()
    for python, machine in needed:
        fitting = [file for file in wheels if tags[file] & supported_tags(python, machine)]
        if not fitting:
            raise SystemExit(
                f"error: {name}=={package['version']} has no wheel for Python {python[0]}.{python[1]} on {machine}"
            )
        hashes |= {wheels[file] for file in fitting}
    if not needed:
        return ""
    condition = f" ; {marker}" if len(needed) < len(targets) else ""
    version = package["version"].partition("+")[0]  # torch's index names its builds behind the plus
    return " ".join([f"{name}=={version}{condition}", *(f"--hash=sha256:{each}" for each in sorted(hashes))])


def requirements_of(target: str) -> str:
    """Return the list of a target, as uv resolves it now; of ``ray``, what it has beyond ``cuda``."""
    with tempfile.TemporaryDirectory() as folder:
        others, lock = Path(folder, "others.txt"), Path(folder, "pylock.toml")
        others.write_text("\n".join(OTHER_PACKAGES.get(target, ("pip",))), "utf-8")
        extras = [word for extra in EXTRAS[target] for word in ("--extra", extra)]
        command = [
            "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "{}.{}".format(*PYTHONS[0]),
            "--constraints", "constraints.txt", "--format", "pylock.toml", "--output-file", str(lock), str(others),
            *(["pyproject.toml", *extras] if extras else []), *TORCH_INDEX.get(target, ()),
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        packages = tomllib.loads(lock.read_text("utf-8"))["packages"]
    if target == "cpu":
        packages = [package for package in packages if not package["name"].startswith(NOT_ON_CPU)]
    if target == "torch":
        packages = [package for package in packages if package["name"] == "torch"]
    lines = [f"{line}\n" for line in map(line_of, packages) if line]
    shared = requirements_of("cuda") if target == "ray" else ""
    return "".join(line for line in lines if line not in shared)


def check(target: str, python: tuple[int, int], machine: str) -> str:
    """Return what uv says against the list of a target, from the index and without a download; empty if nothing."""
    command = [
        "uv", "pip", "install", "--dry-run", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--target",
        tempfile.gettempdir() + "/never", "--python-version", "{}.{}".format(*python), "--python-platform",
        f"{machine}-manylinux_2_{GLIBC}", "--requirements", str(FOLDER / f"requirements-{target}.txt"),
        *TORCH_INDEX.get(target, ()),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.stderr if done.returncode else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the lists, or check them."""
    parser = argparse.ArgumentParser(description="Write or check the lists of packages of the image.")
    parser.add_argument("--check", action="store_true", help="resolve each list for each machine; write nothing")
    if parser.parse_args(arguments).check:
        problems = [check(target, (3, 12), machine) for target in EXTRAS for machine in MACHINES]
        print("".join(problems), file=sys.stderr, end="")
        return int(any(problems))
    for target in EXTRAS:
        (FOLDER / f"requirements-{target}.txt").write_text(requirements_of(target), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
