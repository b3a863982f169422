"""Pages, Markdown and plain text put together at random: each of their words is in a passage or its title."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from rag_posfix.retrieval.ingest.ingest import read_documents

TAGS = (
    "div p span section article aside h1 h2 h5 li td blockquote pre figcaption label button summary dt dd em b a time "
    "code center details fieldset legend address small"
)


class Writer:
    """Writes texts of words that occur once."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.numbers = itertools.count()

    def words(self) -> str:
        count = self.draw.choice((1, 2, 5, 12, 30))
        text = " ".join(f"wd{next(self.numbers)}x" for _ in range(count))
        return text + self.draw.choice(("", ".", ":", "!"))

    def markdown(self) -> str:
        one, two = self.words(), self.words()
        return self.draw.choice((
            f"{'#' * self.draw.randint(1, 7)} {one}", f"{one}\n{self.draw.choice('=-~*') * self.draw.choice((3, 20))}",
            f"- {one}\n  - {two}", f"1. {one}\n2. {two}", f"```sh\n# {one}\n{two}\n```", f"> {one}\n> {two}",
            f"| {one} | b |\n|---|---|\n| {two} | c |", self.draw.choice(("---", "***", "=====")), one.upper(),
            f"[{one}](http://x)", f"    {one}\n    {two}", f"Q: {one}\nA: {two}", f"**{one}**", f"{one}\n{two}",
        ))  # fmt: skip

    def html(self, depth: int = 0) -> str:
        def inner() -> str:
            if depth > 2 or self.draw.random() < 0.5:
                return self.words()
            return self.html(depth + 1) + self.words() + self.html(depth + 1)

        tag = self.draw.choice(TAGS.split())
        forms = (
            lambda: f"<ul><li>{inner()}</li><li>{inner()}</li></ul>",
            lambda: f"<table><caption>{self.words()}</caption><tr><th>{self.words()}<td>{inner()}</table>",
            lambda: f"{self.words()}<br>{self.words()}",
            lambda: f"<details><summary>{self.words()}</summary>{inner()}</details>",
            *[lambda: f"<{tag}>{inner()}</{tag}>"] * 6,
        )
        return self.draw.choice(forms)()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("suffix", ["html", "md", "txt"])
def test_no_word_of_a_text_is_lost(tmp_path, suffix, seed):
    writer = Writer(seed)
    pieces = [writer.html() if suffix == "html" else writer.markdown() for _ in range(8)]
    text = f"<body>{''.join(pieces)}</body>" if suffix == "html" else "\n\n".join(pieces) + "\n"
    (tmp_path / f"a.{suffix}").write_text(text)
    read = " ".join(f"{d.metadata.get('title', '')} {d.page_content}" for d in read_documents([tmp_path])).lower()
    assert [word for word in re.findall(r"wd\d+x", text.lower()) if word not in read] == []
