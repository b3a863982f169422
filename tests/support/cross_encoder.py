"""A tiny cross-encoder with random weights, as a folder that sentence-transformers reads."""

from __future__ import annotations

import torch
import transformers

LETTERS = "abcdefghijklmnopqrstuvwxyz.,?!"
MAX_LENGTH = 64


def tiny_cross_encoder(folder, *, num_labels=1, activation=None):
    """Write a BERT of two layers that reads letters, one token each, words in the order of its vocabulary."""
    from sentence_transformers import CrossEncoder

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary, model_max_length=MAX_LENGTH)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=MAX_LENGTH, num_labels=num_labels,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.05)
    plain = folder / "plain"
    model.save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    options = {} if activation is None else {"activation_fn": activation}
    CrossEncoder(str(plain), **options).save_pretrained(str(folder / "model"))
    return folder / "model"


def tiny_sentence_encoder(folder):
    """Write the same BERT as a sentence encoder: the mean of its last states."""
    from sentence_transformers import SentenceTransformer

    tiny_cross_encoder(folder)
    SentenceTransformer(str(folder / "plain"), device="cpu").save_pretrained(str(folder / "sentences"))
    return folder / "sentences"
