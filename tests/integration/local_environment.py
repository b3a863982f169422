"""An environment with only what an installation brings, made from links to this environment; and wheels made of it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def closure(names, extras=()):
    """Return the installed distributions that these need, themselves included; ``extras`` are those of the first."""
    from packaging.requirements import Requirement

    found: dict[str, Distribution] = {}
    waiting = [(name, frozenset(extras)) for name in names]
    seen = set()
    while waiting:
        name, wanted = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if (key, wanted) in seen:
            continue
        seen.add((key, wanted))
        try:
            one = found.setdefault(key, distribution(name))
        except PackageNotFoundError:
            continue  # for another platform
        for text in one.requires or ():
            need = Requirement(text)
            environments = [{"extra": extra} for extra in wanted] or [{"extra": ""}]
            if need.marker is None or any(need.marker.evaluate(each) for each in environments):
                waiting.append((need.name, frozenset(need.extras)))
    return found


def make_environment(folder, distributions):
    """Make a virtual environment with links to what ``distributions`` installed; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    for one in distributions:
        for file in one.files or ():
            top = Path(file.parts[0])
            if file.parts[0] in ("..", "__pycache__") or (site / top).exists():
                continue
            (site / top).symlink_to(Path(one.locate_file(top)))
    return folder / "bin" / "python"


def wheel_of(one, folder):
    """Write the wheel that a distribution was installed from, out of its installed files; return it."""
    name = one.metadata["Name"].replace("-", "_")
    wheel = folder / f"{name}-{one.version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in one.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts and file.name not in ("INSTALLER", "RECORD"):
                archive.write(one.locate_file(file), str(file))
        archive.writestr(f"{name}-{one.version}.dist-info/RECORD", "")
    return wheel
