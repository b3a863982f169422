"""``rag-posfix verify``: check the attention hook on a model, and list the methods that the model supports."""

from __future__ import annotations

from rag_posfix.cli.options import AdapterFolder, AsJson, DeviceName, ModelName, settings_from
from rag_posfix.cli.output import emit_json, out, status


def verify(
    model: ModelName = None, adapter: AdapterFolder = None, device: DeviceName = None, as_json: AsJson = False
) -> None:
    """Compare the logits of the patched and the unmodified model, and list the methods that the model supports."""
    settings = settings_from(model=model, adapter=adapter, device=device)
    with status("loading the model"):
        from rag_posfix.generation.load import generation_config_of
        from rag_posfix.mitigations import MITIGATIONS
        from rag_posfix.patching.verify import verify as compare
        from rag_posfix.pipeline.build import build_engine

        engine = build_engine(settings)
    loaded = engine.loaded
    found = compare(loaded.model, loaded.spec, thorough=True)
    ignored = generation_config_of(settings.model, settings.cache_dir).ignored
    reasons = {name: cls().refusal(loaded.spec.shape) for name, cls in MITIGATIONS.items()}
    supported = [name for name, reason in reasons.items() if reason is None]
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    if as_json:
        emit_json(
            {
                "model": engine.model_id,
                "family": loaded.spec.family.model_type,
                "dtype": str(loaded.model.dtype).removeprefix("torch."),
                "device": str(loaded.device),
                "max_logit_difference": found.max_logit_difference,
                "differences": found.differences,
                "eos_ids": sorted(engine.encoder.eos_ids),
                "generation_config_not_applied": ignored,
                "supported": supported,
                "refused": refused,
            }
        )
        return
    console = out()
    console.print(f"{engine.model_id} ({loaded.spec.family.model_type}, {loaded.model.dtype})", highlight=False)
    console.print(f"largest logit difference with the attention hook: {found.max_logit_difference:g}", highlight=False)
    checks = ", ".join(f"{check} {difference:g}" for check, difference in found.differences.items())
    console.print(f"by check: {checks}", highlight=False)
    console.print(f"tokens that end an answer: {sorted(engine.encoder.eos_ids)}", highlight=False)
    if ignored:
        console.print(f"not applied of its generation config: {dict(ignored)}", highlight=False)
    console.print(f"supported: {', '.join(supported)}", highlight=False)
    for name, reason in refused.items():
        console.print(f"refused: {name}: {reason}", highlight=False)
