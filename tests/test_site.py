"""The documentation site: it builds without a warning, its commands exist, and its messages are those of the code."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer.main
import yaml

from docs.generate import GROUPS
from docs.reference_pages import command_line, configuration
from docs.site_hooks import MOVED, ROOT_PAGES, root_page, without_links_to_files
from rag_posfix import __version__
from rag_posfix.cli.main import app
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.settings import (
    CacheSettings,
    PassageStoreSettings,
    RemoteSettings,
    ServiceSettings,
    Settings,
    TelemetrySettings,
)
from tests.integration.chromium import chromium

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REPOSITORY = "https://repository.example/rag_posfix"
OWN = (
    "index.md", "choosing-a-model.md", "choosing-a-method.md", "passages.md", "concepts.md", "install.md",
    "troubleshooting.md", "measure.md", "tutorials/rag-app.md", "serving.md",
)  # fmt: skip


class Links(HTMLParser):
    """Collects ids, and targets of links and images."""

    def __init__(self, page):
        super().__init__()
        self.targets, self.ids = [], set()
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.add(found.get("id"))
        if tag in ("a", "img"):
            self.targets.append(found.get("href") or found.get("src") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with warnings as errors; a build takes about six seconds."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": REPOSITORY},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_make_docs_writes_the_generated_parts_and_builds_the_site():
    planned = subprocess.run(["make", "--dry-run", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert planned.returncode == 0, planned.stderr
    written, built = planned.stdout.index("docs.generate"), planned.stdout.index("mkdocs build --strict")
    assert written < built


@pytest.mark.slow
def test_every_link_of_the_site_has_its_target(site):
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 40
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            found = (page.parent / path).resolve() if path else page
            if not found.exists() or (anchor and found in pages and anchor not in pages[found].ids):
                broken.append(f"{page.relative_to(site)}: {target}")
    assert broken == []


def test_the_reference_shows_signatures_and_meanings_of_the_public_names(site):
    api = (site / "reference" / "api.html").read_text("utf-8")
    for words in ("build_pipeline", "document_block", "PosfixRanker", "answer_from_memory", "Finds the passages",
                  "accuracy_full_text"):  # fmt: skip
        assert words in api


def test_the_first_page_of_every_kind_is_in_the_navigation(site):
    start = (site / "index.html").read_text("utf-8")
    for title in ("Start", "Use", "Run", "Measure", "Methods", "Research", "Reference", "Develop"):
        assert title in start


def test_a_page_leads_to_its_neighbours_and_to_the_repository_and_names_the_version(site):
    page = (site / "retrieval.html").read_text("utf-8")
    assert 'aria-label="Previous: Choose a method"' in page
    assert 'aria-label="Next: Rerank"' in page
    assert f"rag_posfix {__version__}" in page
    assert REPOSITORY in page


def test_a_label_of_the_navigation_is_the_title_of_its_page():
    pages = [(label, page) for tab in navigation() for entries in tab.values() for label, page in flat(entries)]
    titles = {
        page: re.search("^# (.+)$", (ROOT / ROOT_PAGES.get(page, f"docs/{page}")).read_text("utf-8"), re.MULTILINE)[1]
        for _, page in pages
    }
    assert len(pages) > 40
    assert [(label, titles[page]) for label, page in pages if label not in (titles[page], "Home")] == []


def flat(entries):
    """The labels and pages of a tab, those of its groups too."""
    for entry in entries:
        for label, page in entry.items():
            yield from flat(page) if isinstance(page, list) else [(label, page)]


def navigation():
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]


def test_the_site_has_eight_tabs_of_at_most_eight_entries():
    tabs = {title: entries for tab in navigation() for title, entries in tab.items()}
    assert list(tabs) == ["Start", "Use", "Run", "Measure", "Methods", "Research", "Reference", "Develop"]
    groups = [
        pages for entries in tabs.values() for entry in entries for pages in entry.values() if isinstance(pages, list)
    ]
    assert {title: len(entries) for title, entries in tabs.items() if len(entries) > 8} == {}
    assert [pages for pages in groups if len(pages) > 8] == []


def test_every_method_is_in_one_of_the_five_groups():
    assert len(GROUPS) == 5
    assert sorted(name for _, names in GROUPS.values() for name in names.split()) == sorted(MITIGATIONS.names())


def test_former_addresses_lead_to_pages_and_anchors_that_exist(site):
    for page, target in MOVED.items():
        path, _, anchor = target.partition("#")
        assert f"url={target}" in (site / f"{page}.html").read_text("utf-8")
        assert not anchor or anchor in Links((site / page).parent / path).ids


def test_files_of_the_root_are_pages_with_working_links(site):
    assert "Unreleased" in (site / "changelog.html").read_text("utf-8")
    assert "Report a vulnerability" in (site / "security.html").read_text("utf-8")
    text = "[a](docs/haystack.md), [b](docs/serving.md#tls), [c](LICENSE), [d](CHANGELOG.md), [e](#f), [g](https://h)"
    shown = "[a](frameworks.md#haystack), [b](serving.md#tls), [c](../LICENSE), [d](changelog.md)"
    assert root_page(text) == f"{shown}, [e](#f), [g](https://h)"


def test_each_command_has_a_page_and_the_page_of_all_links_to_it(site):
    names = re.findall(r"^## rag-posfix (\S.*)$", (DOCS / "reference" / "cli.md").read_text("utf-8"), re.MULTILINE)
    assert len(names) > 40
    links = Links(site / "reference" / "cli.html")
    for name in names:
        page = f"{name.replace(' ', '-')}.html"
        assert f"rag-posfix {name}" in (site / "reference" / "cli" / page).read_text("utf-8")
        assert f"cli/{page}" in links.targets
        assert f"rag-posfix-{name.replace(' ', '-')}" in links.ids


def test_no_page_is_wider_than_a_phone(site):
    written = [site / path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")]
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        widths = {}
        for path in [*written, site / "changelog.html", site / "reference" / "cli" / "ask.html"]:
            page.goto(path.as_uri(), wait_until="domcontentloaded")
            widths[path.name] = page.evaluate("document.documentElement.scrollWidth")
    assert {name: width for name, width in widths.items() if width > 390} == {}


def test_defaults_of_the_reference_are_those_of_the_code():
    settings = configuration()
    assert "- `RAG_POSFIX_INDEXES` (`{}`): " in settings
    assert "- `RAG_POSFIX_REMOTE` " not in settings
    assert "- `RAG_POSFIX_REMOTE_RETRIES` (`2`): " in settings
    assert "- `RAG_POSFIX_SERVICE_DATA_DIR` (`~/.local/share/rag_posfix`): " in settings
    commands = command_line()
    assert len(re.findall(r"^- `-.*: \w.*$", commands, re.MULTILINE)) > 100
    assert "- `--k`: Put this number of passages into the prompt. (`10`)" in commands


def test_every_extra_is_on_the_page_that_says_how_to_install():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    page = (DOCS / "install.md").read_text("utf-8")
    assert [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in page] == []


def test_no_page_installs_a_project_that_only_others_could_publish():
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *DOCS.rglob("*.md")]
    assert [
        page.name for page in pages if re.search(r"pip install[^`\n&]*['\" ]rag.posfix", page.read_text("utf-8"))
    ] == []


def test_programs_that_pages_include_are_there_in_full(site):
    for page in ("tutorials/rag-app", "serving"):
        text = re.sub(r"<[^>]+>", "", (site / f"{page}.html").read_text("utf-8"))
        assert "def main(" in text, page


def test_a_link_that_leaves_the_documentation_becomes_a_path_that_exists(caplog):
    text = "[Start](index.md), [Results](../results.md#top), [the code](../../rag_posfix/assembly)"
    shown = "[Start](index.md), [Results](../results.md#top), the code (`rag_posfix/assembly`)"
    assert without_links_to_files(text, "tutorials/a.md") == shown
    assert without_links_to_files("[`results`](../benchmarks/results)", "a.md") == "`results`"
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        without_links_to_files("[x](../absent.md)", "a.md")
    assert "a.md links to absent.md, which the repository does not have" in caplog.text


def commands():
    """Return each command of the program in the pages."""
    found = []
    for name in OWN:
        for block in re.findall(r"```(?:bash)?\n(.*?)```", (DOCS / name).read_text("utf-8"), re.DOTALL):
            found += [line for line in block.replace("\\\n", " ").splitlines() if line.startswith("rag-posfix ")]
    return sorted(set(found))


@pytest.mark.parametrize("line", commands())
def test_a_command_of_a_page_is_one_that_the_program_takes(line):
    command = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= options


def test_every_setting_is_on_the_page_of_the_configuration():
    text = (DOCS / "reference" / "configuration.md").read_text("utf-8")
    groups = (CacheSettings, PassageStoreSettings, RemoteSettings, ServiceSettings, Settings, TelemetrySettings)
    fields = {f"{kind.model_config['env_prefix']}{name}".upper() for kind in groups for name in kind.model_fields}
    missing = {name for name in fields if f"- `{name}` " not in text}
    groups_of_settings = {"RAG_POSFIX_CACHE", "RAG_POSFIX_PASSAGES", "RAG_POSFIX_REMOTE", "RAG_POSFIX_TELEMETRY"}
    assert missing == groups_of_settings, "groups have tables of their own"


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code():
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    messages = re.findall(r"^## `(.*)`$", page, re.MULTILINE)
    source = "".join(path.read_text("utf-8") for path in (ROOT / "rag_posfix").rglob("*.py"))
    assert len(messages) > 4
    assert [message for message in messages if message not in source] == []


@pytest.mark.parametrize("term", ["order-invariant", "row", "warm", "gold passage", "tenant"])
def test_every_term_of_the_concepts_is_marked_where_it_is_first_used(term):
    text = (DOCS / "concepts.md").read_text("utf-8")
    pictures_and_tables = r"!\[[^\]]*\]\([^)]*\)|<!-- table.*?end of table -->"
    prose = re.sub(r"(?m)^#.*$|^- \*\*.*?\*\*", "", re.sub(pictures_and_tables, "", text, flags=re.DOTALL))
    first = re.search(rf"\*?\b{term}s?\b", prose, re.IGNORECASE)
    assert first[0].startswith("*"), f"{term} is used before it is defined: {prose[first.start() :][:60]!r}"


def test_that_the_default_reader_is_small_is_said_at_the_top_of_the_first_pages():
    for name in ("index.md", "choosing-a-model.md", "langchain.md"):
        assert "For real use" in (DOCS / name).read_text("utf-8")[:2500], name
