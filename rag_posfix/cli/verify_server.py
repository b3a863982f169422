"""``rag-posfix verify --model openai:NAME@URL``: what runs on a server, from one probe of it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Any

from rag_posfix.cli.output import out, say, status, table
from rag_posfix.settings import Settings


def verify_server(settings: Settings) -> dict[str, Any]:
    """Return the JSON object of a server: what it gives, and which arrangements run on it."""
    with status("asking the server"):
        from rag_posfix.generation.remote.address import parse_remote
        from rag_posfix.generation.remote.plain_prompts import NEAREST, remote_refusal
        from rag_posfix.mitigations import MITIGATIONS
        from rag_posfix.pipeline.servers import open_remote_generator
        from rag_posfix.reranking import RERANKERS

        with closing(open_remote_generator(settings)) as generator:
            facts = generator.probe()
            methods = {name: remote_refusal(cls(**cls.example)) for name, cls in MITIGATIONS.items()}
            readers = {name: getattr(cls, "readers", ()) for name, cls in RERANKERS.items()}
            rerankers = {
                name: None if not protocols or isinstance(generator, protocols) else "it reads attention in the engine"
                for name, protocols in readers.items()
            }
    if not facts.prompt_log_probs:
        rerankers["likelihood"] = "the server gives no log-probabilities of prompts (completions with echo)"
    return {
        "model": parse_remote(settings.model).name,
        "family": "remote",
        "max_logit_difference": None,
        "server": {"url": parse_remote(settings.model).url, **asdict(facts)},
        "supported": [name for name, reason in methods.items() if reason is None],
        "refused": {name: f"{reason}; {NEAREST}" for name, reason in methods.items() if reason is not None},
        "rerankers": {
            "supported": [name for name, reason in rerankers.items() if reason is None],
            "refused": {name: reason for name, reason in rerankers.items() if reason is not None},
        },
        "context_window_setting": settings.remote.context_window,
        "nearest": NEAREST,
    }


def show_server(data: dict[str, Any]) -> None:
    """Print what a server gives and what runs on it."""
    server, rerankers = data["server"], data["rerankers"]
    cached = server["cached_tokens"]
    say(
        f"{data['model']} at {server['url']}",
        f"passages are judged by: {server['judgements']}",
        f"log-probabilities of prompts: {'yes' if server['prompt_log_probs'] else 'no'}",
        f"context window: {server['context_window'] or 'not listed'}; "
        f"RAG_POSFIX_REMOTE_CONTEXT_WINDOW is {data['context_window_setting']}",
        "prefix cache: " + ("not reported" if cached is None else f"{cached} tokens of a repeated prompt"),
    )
    rows = table("kind", "name", "runs", "why not", title="arrangements")
    for kind, names, refused in (
        ("reranker", rerankers["supported"], rerankers["refused"]),
        ("mitigation", data["supported"], data["refused"]),
    ):
        for name in names:
            rows.add_row(kind, name, "yes", "")
        for name, reason in refused.items():
            rows.add_row(kind, name, "no", reason.removesuffix(f"; {data['nearest']}"))
    out().print(rows)
    say(f"nearest that runs: {data['nearest']}")
