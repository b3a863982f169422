"""Many texts are embedded in batches on several cores, and their vectors are those of the model."""

import threading

import numpy as np
import pytest
import torch

from rag_posfix.generation.engine import TextEncoder
from rag_posfix.retrieval.embeddings import SentenceEmbeddings


class LengthEncoder(torch.nn.Module):
    """A sentence encoder whose vector is the length of the text; notes how it is run."""

    device = torch.device("cpu")

    def __init__(self, meeting):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.meeting = meeting

    def __deepcopy__(self, memo):
        other = LengthEncoder(self.meeting)
        other.weight = memo[id(self.weight)]
        return other

    def encode_document(self, texts, **_):
        self.meeting.note((threading.get_ident(), id(self), self.weight.data_ptr(), torch.get_num_threads()))
        return np.array([[len(text)] for text in texts], dtype="float64")


class Meeting:
    """Two threads meet once, so that neither can do all the work."""

    def __init__(self):
        self.barrier = threading.Barrier(2)
        self.notes = []

    def note(self, what):
        self.notes.append(what)
        if len(self.notes) <= 2:
            self.barrier.wait(60)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_core_has_a_model_of_its_own_with_shared_weights_and_one_thread(two_threads):
    meeting = Meeting()
    vectors = TextEncoder(LengthEncoder(meeting), batch_size=3)(["a" * number for number in range(10)])
    assert vectors.dtype == np.float32
    assert vectors[:, 0].tolist() == list(range(10)), "in the order of the texts"
    threads, models, weights, threads_inside = map(set, zip(*meeting.notes, strict=True))
    assert (len(meeting.notes), len(threads), len(models), len(weights), threads_inside) == (4, 2, 2, 1, {1})
    assert torch.get_num_threads() == 2, "as before"


@pytest.mark.weights
@pytest.mark.slow
def test_vectors_of_many_texts_are_those_of_the_model(two_threads):
    texts = [f"The lighthouse number {number} was built in {1800 + number}." for number in range(20)]
    many = SentenceEmbeddings(batch_size=4, encoder=TextEncoder)
    plain = SentenceEmbeddings(batch_size=4)
    found, expected = torch.tensor(many.embed_documents(texts)), torch.tensor(plain.embed_documents(texts))
    assert float((found * expected).sum(1).min()) > 0.9995
    assert many.embed_documents(texts[:4]) == plain.embed_documents(texts[:4]), "one batch is the model's own"
