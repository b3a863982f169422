"""What the site does beyond Markdown.

Pages link to files outside of docs/, which works in the repository; on the site the path replaces the link.
CHANGELOG.md, CONTRIBUTING.md and SECURITY.md are pages too, and each command has one. Addresses that pages had before
lead to the new ones.
Every page has the version.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from rag_posfix import __version__

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("mkdocs.hooks.links")

ROOT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
COMMANDS, COMMANDS_FOLDER = "reference/cli.md", "reference/cli"
MOVED = {
    "add-a-cache-backend": "add-a-backend.html#add-a-cache-backend",
    "add-a-dialect": "add-a-backend.html#add-an-api-format",
    "add-a-generator": "add-a-backend.html#add-a-generator",
    "add-a-mitigation": "add-a-method.html#add-a-method",
    "add-a-probe": "add-a-method.html#add-a-probe-a-task-or-an-encoding",
    "add-a-reranker": "add-a-method.html#add-a-reranker-or-an-order",
    "add-an-order": "add-a-method.html#an-order",
    "agents": "frameworks.html#agents-mcp",
    "assembly": "prompts.html#order-the-prompt",
    "default-method": "results-tables.html#the-default-method",
    "haystack": "frameworks.html#haystack",
    "hostile-passages": "results.html#hostile-passages",
    "laboratory-results": "laboratory.html#what-was-measured",
    "languages": "prompts.html#languages",
    "large-models": "results.html#large-models",
    "llama_index": "frameworks.html#llamaindex",
    "methods/blended": "independent-passages.html#blended",
    "methods/calibrated_attention": "scaled-positions.html#calibrated_attention",
    "methods/canonical_rotations": "row-per-passage.html#canonical_rotations",
    "methods/committee": "row-per-passage.html#committee",
    "methods/context_experts": "row-per-passage.html#context_experts",
    "methods/head_scaling": "scaled-positions.html#head_scaling",
    "methods/hidden_scaling": "scaled-positions.html#hidden_scaling",
    "methods/inter_document": "attending-passages.html#inter_document",
    "methods/layer_scaling": "scaled-positions.html#layer_scaling",
    "methods/multi_base": "scaled-positions.html#multi_base",
    "methods/none": "plain-and-combined.html#none",
    "methods/parallel_encoding": "independent-passages.html#parallel_encoding",
    "methods/parallel_windows": "independent-passages.html#parallel_windows",
    "methods/passage_answers": "row-per-passage.html#passage_answers",
    "methods/repeated_passages": "plain-and-combined.html#repeated_passages",
    "methods/set_prompting": "independent-passages.html#set_prompting",
    "methods/shifted_rotary": "scaled-positions.html#shifted_rotary",
    "methods/sorted_inter_document": "attending-passages.html#sorted_inter_document",
    "methods/stable_mask": "scaled-positions.html#stable_mask",
    "methods/stack": "plain-and-combined.html#stack",
    "models": "choosing-a-model.html#how-a-model-loads",
    "production-cache": "passages.html",
    "reference/http-anthropic": "http.html#anthropic",
    "reference/http-cohere": "http.html#cohere",
    "reference/http-ollama": "http.html#ollama",
    "reference/http-openai": "http.html#openai",
    "reference/http-rerank": "http.html#jina-tei-vllm-rerank-and-score",
    "reference/records": "api.html#records",
    "reranking-results": "results-tables.html#rerankers",
    "results-discussion": "compared.html",
    "scale": "operations.html#size",
    "settings": "results-tables.html#the-default-method",
    "tutorials/measure-your-model": "../measure.html#with-a-program",
    "tutorials/service": "../serving.html",
    "upgrade": "install.html#upgrade",
}
"""Former pages, and the addresses of what they had."""

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\.?/[^)\s#]*)(?:#[^)\s]*)?\)")
_RELATIVE = re.compile(r"\]\((?!\w+:|#)([^)\s]+)\)")


def on_config(config: Any, **_: Any) -> None:
    """Put the version under every page, and above it a link to the repository where ``REPOSITORY_URL`` names it."""
    config["copyright"] = f"rag_posfix {__version__}"
    if address := os.environ.get("REPOSITORY_URL"):
        config["repo_url"], config["repo_name"] = address, "Repository"


def on_files(files: Files, *, config: Any, **_: Any) -> Files:
    """Add the pages whose text is in the root of the repository, and one for each command."""
    for page, name in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=root_page((ROOT / name).read_text("utf-8"))))
    for command, text in command_pages((ROOT / "docs" / COMMANDS).read_text("utf-8"))[1].items():
        files.append(File.generated(config, f"{COMMANDS_FOLDER}/{command}.md", content=text))
    return files


def command_pages(reference: str) -> tuple[str, dict[str, str]]:
    """Return the page of all commands with links to theirs, and the page of each, from what docs/generate.py wrote."""
    head, *sections = re.split(r"^## (?=rag-posfix\b)", reference, flags=re.MULTILINE)
    pages = {}
    lines = []
    for section in sections:
        name = section.partition("\n")[0]
        command, below = name.removeprefix("rag-posfix").strip().replace(" ", "-"), section.partition("\n")[2].strip()
        if command:
            pages[command] = f"# {name}\n\n{below}\n\n[All commands](../cli.md)\n".replace("](#", "](../cli.md#")
            summary = next((line for line in below.splitlines() if line[:1].isalnum()), "")
            lines.append(f"- [`{name}`](cli/{command}.md){{: #rag-posfix-{command} }}: {summary}")
        else:
            head += f"## {section}"
    return f"{head}## Commands\n\n" + "\n".join(lines) + "\n", pages


def root_page(markdown: str) -> str:
    """Return the text of a file in the root of the repository as a page, with links to where pages are now."""

    def linked(found: re.Match[str]) -> str:
        target = found[1]
        if not target.startswith("docs/"):
            by_file = {name: page for page, name in ROOT_PAGES.items()}
            return f"]({by_file.get(target, f'../{target}')})"
        page = target.removeprefix("docs/")
        moved = MOVED.get(page.partition(".md")[0])
        return f"]({moved.replace('.html', '.md') if moved else page})"

    return _RELATIVE.sub(linked, markdown)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page with links to the pages of commands, and without links to files outside of docs/."""
    if page.file.src_uri == COMMANDS:
        return command_pages(markdown)[0]
    markdown = re.sub(r"cli\.md#rag-posfix-([\w-]+)", r"cli/\1.md", markdown)
    return without_links_to_files(markdown, page.file.src_uri)


def without_links_to_files(markdown: str, page: str) -> str:
    """Return ``markdown`` with the path in place of each link that leaves docs/.

    Args:
        markdown: The text of the page.
        page: Path of the page in docs/.
    """

    def shown(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.startswith("docs/"):
            return found[0]
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which the repository does not have", page, path)
        plain = text.strip("`")
        return text if plain in path else f"{text} (`{path}`)"

    return _LINK.sub(shown, markdown)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write a page at each former address that leads to the new one, and keeps the anchor of the address."""
    for page, target in MOVED.items():
        path = Path(config["site_dir"]) / f"{page}.html"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'<!doctype html><meta charset="utf-8"><title>Moved</title><link rel="canonical" href="{target}">'
            f'<meta http-equiv="refresh" content="1; url={target}">'
            f"<script>location.replace(location.hash ? {json.dumps(target.partition('#')[0])} + location.hash : "
            f"{json.dumps(target)})</script>"
            f'<p>This page is now <a href="{target}">here</a>.</p>\n',
            encoding="utf-8",
        )
