"""Opening what is to be probed: a small decoder where a folder holds one, else a language model."""

from __future__ import annotations

from pathlib import Path

from rag_posfix.probing.language_model import LanguageModel
from rag_posfix.probing.small_decoder import SmallDecoder, holds_decoder
from rag_posfix.probing.subject import Subject
from rag_posfix.settings import Settings


def open_subject(settings: Settings) -> Subject:
    """Return the model of the settings, loaded."""
    folder = Path(settings.model)
    if holds_decoder(folder):
        from rag_posfix.encodings import load_decoder
        from rag_posfix.generation.load import usable_device

        return SmallDecoder(load_decoder(folder, usable_device(settings.device)).eval(), folder.name)
    from rag_posfix.pipeline.build import build_engine

    return LanguageModel(build_engine(settings))
