"""A release: one version everywhere, a section of the changelog, and a tag in this copy."""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deployments.ci import release
from deployments.ci.release import ReleaseError, notes, problems, section, set_version, tag, version

ROOT = Path(__file__).resolve().parents[2]
DAY = datetime.date(2027, 1, 31)
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A lamp.\n\n## [0.0.9] - 2026-01-01\n\n- Oil.\n"


def git(root, *arguments):
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A repository that holds what shows the version, committed."""
    for path in (*release.SHOWN, release.SOURCE):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, "utf-8")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Releaser")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "releaser@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(root):
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "x")


def test_every_file_that_shows_the_version_shows_the_one_of_the_package():
    shown = [missing for missing in problems(ROOT) if " shows " in missing]
    assert shown == []


def test_an_image_without_its_digest_keeps_the_tree_from_being_released(copy):
    set_version("0.2.0", copy, DAY)
    dockerfile = copy / release.DOCKERFILE
    text = dockerfile.read_text("utf-8")
    digest = re.search("@sha256:[0-9a-f]{64}", text)
    assert digest is not None
    dockerfile.write_text(text.replace(digest[0], "") + "\nFROM ghcr.io/astral-sh/uv:0.13.9 AS uv\n", "utf-8")
    commit(copy)
    images = [missing.split()[4] for missing in problems(copy) if "without its digest" in missing]
    assert images == ["docker.io/library/python:3.12.15-slim-bookworm", "ghcr.io/astral-sh/uv:0.13.9"]


def test_a_new_version_is_written_everywhere_and_dates_the_unreleased_changes(copy):
    set_version("0.2.0", copy, DAY)
    assert version(copy) == "0.2.0"
    commit(copy)
    assert problems(copy) == []
    assert notes(copy) == "### Added\n\n- A lamp."
    changelog = (copy / "CHANGELOG.md").read_text("utf-8")
    assert "## [Unreleased]\n\n## [0.2.0] - 2027-01-31\n" in changelog
    assert section(changelog, "## [0.0.9]").strip() == "- Oil."
    assert "tag: 0.2.0-cuda" in (copy / "deployments/helm/values/gpu.yaml").read_text("utf-8")


def test_a_tag_has_the_section_of_the_changelog_and_is_made_once(copy):
    set_version("0.2.0", copy, DAY)
    commit(copy)
    assert tag(copy) == "v0.2.0"
    assert (
        git(copy, "tag", "--list", "--format=%(contents)", "v0.2.0").strip()
        == "rag_posfix 0.2.0\n\n### Added\n\n- A lamp."
    )
    assert problems(copy) == ["the tag v0.2.0 exists; set a higher version"]


def test_what_is_missing_is_named(copy):
    chart = copy / "deployments/helm/rag-posfix/Chart.yaml"
    chart.write_text(
        chart.read_text("utf-8").replace(f'appVersion: "{version(copy)}"', 'appVersion: "0.0.1"'), "utf-8"
    )
    missing = problems(copy)
    assert missing[0].startswith("deployments/helm/rag-posfix/Chart.yaml shows 0.0.1, ")
    assert f"CHANGELOG.md has no section ## [{version(copy)}]" in missing[1]
    assert missing[2] == "the working tree has changes; commit them"


@pytest.mark.parametrize("wrong", ["1", "v0.2.0", "0.2", "0.2.0-beta"])
def test_a_version_that_is_no_number_is_refused(copy, wrong):
    with pytest.raises(ReleaseError, match="must be a number such as"):
        set_version(wrong, copy, DAY)


def test_a_release_without_changes_is_refused(copy):
    set_version("0.2.0", copy, DAY)
    with pytest.raises(ReleaseError, match="nothing under"):
        set_version("0.3.0", copy, DAY)


def test_make_release_checks_builds_and_tags_and_publishes_nothing():
    planned = subprocess.run(["make", "--dry-run", "release"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    steps = ["release.py check", "check_wheel.sh", "release.py notes", "release.py tag"]
    places = [planned.stdout.index(step) for step in steps]
    assert places == sorted(places)
    assert not [word for word in ("push", "upload", "twine", "publish ") if word in planned.stdout]
