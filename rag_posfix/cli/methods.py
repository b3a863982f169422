"""``rag-posfix methods`` and ``verify``: all methods, and those that a model supports."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, Plugin, emit, emit_json, open_engine, out, say, status, table, with_settings
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.registry import GROUPS, plugin_entries
from rag_posfix.settings import Settings

FIRST_STAGES = {
    "auto": "Retrieves by embeddings, and three of ten passages by words; scores are those of the embeddings.",
    "dense": "Retrieves by embeddings: the passages whose vectors have the highest cosine with the question's.",
    "bm25": "Retrieves by words: Lucene's BM25 on title and text, without stemming. Needs no embedding model.",
    "hybrid": "Retrieves by embeddings and by words, and fuses both rankings by reciprocal rank.",
}
"""What ``--retriever`` takes."""


def describe_mitigation(cls: Any) -> dict[str, Any]:
    """Return the JSON object of a mitigation: names, paper, requirements and parameters."""
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.parameters import parameters_of

    return {
        "name": cls.name,
        "package": MITIGATIONS.package(cls.name),
        "aliases": list(MITIGATIONS.aliases(cls.name)),
        "presets": {preset: dict(parameters) for preset, parameters in MITIGATIONS.presets(cls.name).items()},
        "summary": (inspect.getdoc(cls) or "").split("\n", 1)[0],
        "paper": cls.paper,
        "deviations": list(cls.deviations),
        "order_invariant": cls.order_invariant,
        "needs_calibration": cls.needs_calibration,
        "training_free": cls.training_free,
        "requires": sorted(cls.requires),
        "parameters": {
            name: {"type": parameter.type, "default": parameter.default, "allowed": parameter.allowed}
            for name, parameter in parameters_of(cls).items()
        },
    }


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method, order, reranker or first stage.")] = None,
    plugin: Plugin = None,
    as_json: AsJson = False,
) -> None:
    """List methods, orders, rerankers and first stages.

    Entries of other packages are listed again, with their package, and so are those of other kinds.
    """
    from rag_posfix.assembly.orders import ORDERS
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.reranking import RERANKERS

    entries = [
        (kind, registry.resolve(name), inspect.getdoc(registry.get(name)) or "")
        for kind, registry in (("order", ORDERS), ("reranker", RERANKERS))
        if name is not None and name in registry
    ]
    if name in FIRST_STAGES:
        entries.append(("first stage", name, FIRST_STAGES[name]))
    if name and entries and name not in MITIGATIONS:
        records = [{"kind": kind, "name": entry, "description": text} for kind, entry, text in entries]
        emit(
            {"found": records},
            as_json,
            lambda _: say(*(f"{entry} ({kind})\n\n{text}" for kind, entry, text in entries)),
        )
        return
    names = (name,) if name else MITIGATIONS.names()
    mitigations = [describe_mitigation(MITIGATIONS.get(entry)) for entry in names]
    if as_json:
        emit_json(
            {
                "mitigations": mitigations,
                "orders": list(ORDERS.names()),
                "rerankers": list(RERANKERS.names()),
                "first_stages": list(FIRST_STAGES),
                "plugins": _plugins(),
            }
        )
    elif name:
        say(inspect.getdoc(MITIGATIONS.get(name)) or "")
    else:
        _show(mitigations, {"orders": ORDERS, "rerankers": RERANKERS})


def _show(mitigations: list[dict[str, Any]], registries: Mapping[str, Any]) -> None:
    rows = table("mitigation (aliases)", "order-invariant", "what it does", "parameters", title="mitigations")
    for entry in mitigations:
        parameters = ", ".join(f"{key}={value['default']}" for key, value in entry["parameters"].items())
        order_free = "yes" if entry["order_invariant"] else "no"
        rows.add_row(_with_aliases(entry["name"], entry["aliases"], "\n"), order_free, entry["summary"], parameters)
    out().print(rows)
    for entry in mitigations:
        for preset, parameters in entry["presets"].items():
            say(f"{preset}: {MethodSpec(entry['name'], parameters).label}")
    for kind, registry in registries.items():
        names = (_with_aliases(name, registry.aliases(name), " ") for name in registry.names())
        say(f"{kind}: {', '.join(names)}")
    say(f"first stages: {', '.join(FIRST_STAGES)}")
    say(*(f"plug-in: {each['kind']} {each['name']} ({each['package']})" for each in _plugins()))


def _plugins() -> list[dict[str, str]]:
    """Return the entries of other packages, of every kind."""
    return [
        {"kind": kind, "name": name, "package": package}
        for kind in GROUPS
        for name, _, package in plugin_entries(kind)
    ]


def _with_aliases(name: str, aliases: Sequence[str], separator: str) -> str:
    return f"{name}{separator}({', '.join(aliases)})" if aliases else name


@with_settings("model", "adapter", "device")
def verify(settings: Settings, as_json: AsJson = False) -> None:
    """Check that a model works here, and list its methods.

    Compares the logits of the patched and the unmodified model. A model on a server is asked what it gives.
    """
    from rag_posfix.generation.remote.connection import is_remote

    if is_remote(settings.model):
        emit(_verify_server(settings), as_json, _show_server)
        return
    engine = open_engine(settings)
    from rag_posfix.generation.load import generation_config_of
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.patching.install import check_again, snapshot_bytes

    loaded, within = engine.loaded, engine.loaded.spec.windowed
    result = check_again(loaded.model, loaded.spec)
    reasons = {name: cls().refusal(loaded.spec.shape) for name, cls in MITIGATIONS.items()}
    in_windows = [
        name for name, cls in MITIGATIONS.items() if reasons[name] and within and cls().refusal(within.shape) is None
    ]
    plain, sizes = loaded.spec.unhooked, dict[str, int]()
    if plain is not None and plain.snapshots is not None:
        numbers = [n for n in (128, 256) if n <= loaded.spec.shape.context_window]
        sizes = {str(n): sum(size for _, size in snapshot_bytes(loaded.model, plain, n)) for n in numbers}
    data = {
        "model": engine.model_id,
        "family": loaded.spec.family.model_type,
        "reading": loaded.spec.reading,
        "structure": loaded.spec.structure,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "max_logit_difference": result.max_logit_difference,
        "differences": result.differences,
        "snapshot_bytes": sizes,
        "eos_ids": sorted(engine.encoder.eos_ids),
        "generation_config_not_applied": generation_config_of(settings.model, settings.cache_dir).ignored,
        "supported": [name for name, reason in reasons.items() if reason is None],
        "supported_in_windows": in_windows,
        "window": None if within is None else within.shape.context_window,
        "refused": {name: reason for name, reason in reasons.items() if reason and name not in in_windows},
    }
    emit(data, as_json, _show_model)


def _show_model(data: dict[str, Any]) -> None:
    say(
        f"{data['model']} ({data['family']}, {data['dtype']}), read with {data['reading']}",
        f"largest logit difference from the unmodified model: {data['max_logit_difference']:g}",
        f"by check: {', '.join(f'{check} {value:g}' for check, value in data['differences'].items())}",
        f"tokens that end an answer: {data['eos_ids']}",
    )
    if (in_batch := data["structure"].get("rows_in_one_batch")) is not None:
        structure = data["structure"]
        sizes = " and ".join(f"{size / 1e6:,.1f} MB of {n} tokens" for n, size in data["snapshot_bytes"].items())
        whole = f"serves it with snapshots of its whole cache, {sizes}" if sizes else "cannot serve it"
        stored = "serves it" if structure["stored_keys"] else whole
        say(f"rows of a method: {'in one batch' if in_batch else 'one after another'}; passage KV store: {stored}")
    if data["generation_config_not_applied"]:
        say(f"not applied of its generation config: {dict(data['generation_config_not_applied'])}")
    say(f"supported: {', '.join(data['supported'])}")
    if data["supported_in_windows"]:
        names = ", ".join(data["supported_in_windows"])
        say(f"supported for prompt and answer of up to {data['window']} tokens (sliding windows): {names}")
    say(*(f"not supported: {name}: {reason}" for name, reason in data["refused"].items()))


def _verify_server(settings: Settings) -> dict[str, Any]:
    """Return the JSON object of a server: what it gives, and which arrangements run on it."""
    with status("asking the server"):
        from rag_posfix.generation.remote.connection import parse_remote
        from rag_posfix.generation.remote.generator import NEAREST, remote_refusal
        from rag_posfix.mitigations import MITIGATIONS
        from rag_posfix.pipeline.retrievers_and_servers import open_remote_generator
        from rag_posfix.reranking import RERANKERS

        with closing(open_remote_generator(settings)) as generator:
            facts = generator.probe()
            methods = {name: remote_refusal(cls(**cls.example)) for name, cls in MITIGATIONS.items()}
            reads = {name: getattr(cls, "reads", ()) for name, cls in RERANKERS.items()}
            rerankers = {
                name: None if not needed or needed & generator.capabilities else "it reads states in the engine"
                for name, needed in reads.items()
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


def _show_server(data: dict[str, Any]) -> None:
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
    if (block := server["block_tokens"]) is not None:
        shared, tokens = server["cached_passage_tokens"], server["passage_tokens"]
        say(f"blocks of the prefix cache: {block} tokens; of a passage of 150 words, {shared} of {tokens} are shared")
        if not shared:
            say(
                "each judgement reads its passage again: make blocks shorter (--block-size of vLLM; hybrids have "
                f"a minimum), or index passages longer than a block (--passage-tokens {block}), or judge no passages "
                "on this server (reranker embedding or cross_encoder)"
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
