"""What is read ahead is not read again, whichever of the documents a question is about and in whichever order."""

from __future__ import annotations

import itertools
import threading
from contextlib import closing

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.documents import content_key
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import KVCodec, PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.pipeline import precompute as module
from rag_posfix.pipeline.precompute import precompute
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder

APART = ["parallel_windows", "set_prompting", "parallel_encoding", "context_experts", "passage_answers"]
DOCUMENTS = [
    Document(id="rome", page_content="Rome lies on the Tiber.", metadata={"title": "Rome"}),
    Document(id="paris", page_content="Paris lies on the Seine, and is larger."),
    Document(id="bread", page_content="Bread is baked in ovens."),
    Document(id="rye", page_content="Rye grows.", metadata={"title": "Rye"}),
]
SECONDS = 60  # enough on a busy machine; nothing waits that long if all is well


@pytest.fixture(scope="module")
def loaded():
    return loaded_model(vocab_size=ToyEncoder.vocab_size, num_hidden_layers=2)


@pytest.fixture
def passes(loaded):
    """Tokens of each forward pass, as they come."""
    seen = []
    handle = loaded.model.register_forward_pre_hook(
        lambda module, arguments, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    yield seen
    handle.remove()


def engine_of(loaded, *tiers, **options):
    return Engine(loaded, ToyEncoder(), "tiny", "print", passages=PassageStore(tiers or [MemoryTier()], **options))


def layout_of(documents=DOCUMENTS, question="Which river?", history=(), template=None):
    assembler = Assembler(ToyEncoder(), 512, template)
    return assembler.assemble(question, documents, order="original", max_new_tokens=1, history=history).layout


def cached(engine, layout, name="parallel_windows", salt=""):
    return engine.open(layout, MitigationChoice(name), salt=salt).cached_tokens


def before_suffix(layout):
    """How many tokens a question that is read ahead finds."""
    return layout.suffix.start


WINDOWS = MitigationChoice("parallel_windows")


@pytest.mark.parametrize("name", APART)
@pytest.mark.slow
def test_a_question_about_any_documents_in_any_order_reads_its_suffix_alone(loaded, passes, name):
    engine = engine_of(loaded)
    assert precompute(engine, DOCUMENTS, MitigationChoice(name)) == before_suffix(layout_of())
    for some in [*itertools.permutations(DOCUMENTS, 2), DOCUMENTS[::-1], DOCUMENTS[:1]]:
        layout = layout_of(some, "And which bread?")
        rows = len(create(name).plan(layout, loaded.spec.shape).rows)
        passes.clear()
        assert cached(engine, layout, name) == before_suffix(layout)
        assert passes[0] == len(layout.suffix) * rows, "the suffix is all that is read"
        assert len(passes) == 1 or name == "passage_answers", "which then writes its drafts"


def test_a_committee_finds_the_passages_of_its_experts(loaded, passes):
    """Its joint row attends to all passages and has to be read."""
    engine = engine_of(loaded)
    assert precompute(engine, DOCUMENTS, MitigationChoice("committee")) == before_suffix(layout_of())
    passes.clear()
    layout = layout_of(DOCUMENTS[::-1])
    engine.open(layout, MitigationChoice("committee"))
    n_experts = len(DOCUMENTS) + 1
    assert passes[0] == len(layout.suffix) * n_experts


def test_answers_are_those_of_a_store_that_was_empty(loaded):
    for name in APART:
        engine = engine_of(loaded)
        precompute(engine, DOCUMENTS, MitigationChoice(name))
        asked = GenerationRequest(layout_of(DOCUMENTS[::-1]), MitigationChoice(name), Sampling(max_tokens=4))
        found = engine.generate(asked)
        assert found.usage.cached_tokens > 0
        assert found.token_ids == engine_of(loaded).generate(asked).token_ids


def test_what_is_held_already_is_not_read_again(loaded, passes):
    engine = engine_of(loaded)
    first = precompute(engine, DOCUMENTS[:2], WINDOWS)
    more = precompute(engine, DOCUMENTS, WINDOWS)
    assert first + more == before_suffix(layout_of())
    passes.clear()
    assert precompute(engine, DOCUMENTS[::-1], WINDOWS) == 0
    assert precompute(engine, DOCUMENTS, MitigationChoice("context_experts")) == 0, "which reads them alike"
    assert passes == []


def test_it_is_kept_on_disk_for_another_process(loaded, tmp_path):
    with closing(PassageStore([DiskTier(tmp_path, KVCodec(), max_bytes=10**8)])) as store:
        precompute(Engine(loaded, ToyEncoder(), "tiny", "print", passages=store), DOCUMENTS, WINDOWS)
    engine = engine_of(loaded, MemoryTier(), DiskTier(tmp_path, KVCodec(), max_bytes=10**8))
    with closing(engine.passages):
        assert cached(engine, layout_of()) == before_suffix(layout_of())


def test_duplicates_and_documents_without_text_are_left_out(loaded):
    same = [Document(id="again", page_content=DOCUMENTS[0].page_content, metadata={"title": "Rome"})]
    empty = [Document(page_content=""), Document(page_content=" \n", metadata={"title": "Nothing"})]
    seen = []
    tokens = precompute(engine_of(loaded), [*DOCUMENTS, *same, *empty], WINDOWS, progress=lambda *at: seen.append(at))
    assert tokens == before_suffix(layout_of())
    assert seen == [(4, 4)]
    assert precompute(engine_of(loaded), [], WINDOWS) == precompute(engine_of(loaded), empty, WINDOWS) == 0


@pytest.mark.parametrize(
    "other",
    [
        Document(page_content="Rome lies on the Tiber.", metadata={"title": "Italy"}),
        Document(page_content="Rome lies  on the Tiber.", metadata={"title": "Rome"}),
    ],
)
def test_documents_that_only_assembly_calls_duplicates_are_read(loaded, other):
    """A question may find either of them without the other."""
    engine = engine_of(loaded)
    precompute(engine, [*DOCUMENTS, other], WINDOWS)
    for one in (DOCUMENTS[0], other):
        assert cached(engine, layout_of([one])) == before_suffix(layout_of([one]))


def test_documents_beyond_the_context_window_are_left_out(loaded):
    """Of such a document a question reads a part, of a length that nobody knows yet."""
    window = loaded.spec.shape.context_window
    fits = window - len(layout_of(DOCUMENTS[:1], "?").token_ids) + len(DOCUMENTS[0].page_content) + len("Rome\n") - 1
    seen = []
    long = [Document(page_content="a" * count) for count in (fits, fits + 1)]
    precompute(engine_of(loaded), long, WINDOWS, progress=lambda *at: seen.append(at))
    assert seen == [(1, 1)]


@pytest.mark.parametrize("name", sorted(set(MITIGATIONS.names()) - {*APART, "committee"}))
def test_a_method_that_does_not_read_passages_apart_is_refused(loaded, passes, name):
    choice = MitigationChoice(name, dict(MITIGATIONS.get(name).example))
    with pytest.raises(ConfigError, match=f"^{name} does not read passages independently") as caught:
        precompute(engine_of(loaded), DOCUMENTS, choice)
    assert set(str(caught.value).rpartition("use one of ")[2].split(", ")) == {*APART, "committee"}
    assert passes == []


def test_parameters_that_place_a_passage_by_its_neighbours_are_refused(loaded):
    with pytest.raises(ConfigError, match=r"^parallel_windows with these parameters places a passage by the length"):
        precompute(engine_of(loaded), DOCUMENTS, MitigationChoice("parallel_windows", {"indentation": "right"}))


def test_a_model_that_the_method_cannot_serve_is_refused():
    engine = engine_of(loaded_model("mistral", vocab_size=ToyEncoder.vocab_size, sliding_window=16))
    with pytest.raises(UnsupportedModelError):
        precompute(engine, DOCUMENTS, WINDOWS)
    with pytest.raises(ConfigError, match=r"^context_experts does not .*; no method does on this model$"):
        precompute(engine, DOCUMENTS, MitigationChoice("context_experts"))


def test_an_engine_without_a_store_is_refused(loaded):
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    with pytest.raises(ConfigError, match=r"^precomputing needs a passage store; "):
        precompute(engine, DOCUMENTS, WINDOWS)


class Hanging(MemoryTier):
    """A slow tier whose first write does not end."""

    name, is_synchronous = "hanging", False

    def __init__(self):
        super().__init__()
        self.over = threading.Event()

    def put_many(self, entries):
        self.over.wait(SECONDS)


def test_a_store_that_does_not_write_in_time_is_an_error(loaded, monkeypatch):
    monkeypatch.setattr(module, "WRITE_TIMEOUT_SECONDS", 0.05)
    tier = Hanging()
    with pytest.raises(ConfigError, match=r"did not write .* within 0\.05 seconds; check its disk"):
        precompute(engine_of(loaded, MemoryTier(), tier), DOCUMENTS, WINDOWS)
    tier.over.set()


@pytest.mark.parametrize("held", [False, True])
def test_a_disk_that_refuses_what_was_read_is_an_error(loaded, tmp_path, monkeypatch, held):
    """Although the memory of this process has it."""
    monkeypatch.setattr(module, "BATCH_PASSAGES", 2)
    disk = DiskTier(tmp_path / "passages", KVCodec(), max_bytes=10**8)
    engine = engine_of(loaded, MemoryTier(), disk)
    if held:
        precompute(engine, DOCUMENTS[:1], WINDOWS)

    def refuse(*_arguments):
        raise OSError("read-only")

    monkeypatch.setattr("rag_posfix.caching.disk.transaction", refuse)
    seen = []
    # prefix and passages are written at once, or one after the other
    with pytest.raises(ConfigError, match=r"kept none of the computed entries \(disk: [12] errors?, "):
        precompute(engine, DOCUMENTS[1:], WINDOWS, progress=lambda *at: seen.append(at))
    assert seen == [], "it is told after the first batch"
    engine.passages.close()


def test_a_disk_too_small_for_any_passage_is_an_error(loaded, tmp_path):
    # An entry takes at most a quarter of the disk: 64 tokens of 256 bytes. The prefix has more, too.
    engine = engine_of(loaded, MemoryTier(), DiskTier(tmp_path, KVCodec(), max_bytes=64 * 1024))
    with (
        closing(engine.passages),
        pytest.raises(ConfigError, match=r"none of the computed entries \(disk: 0 errors"),
    ):
        precompute(engine, [Document(page_content="a" * 70)], WINDOWS)


def test_a_disk_too_small_for_all_passages_is_told(loaded, tmp_path, caplog):
    documents = [Document(page_content=letter * 60) for letter in "abcdef"]
    engine = engine_of(loaded, MemoryTier(), DiskTier(tmp_path, KVCodec(), max_bytes=64 * 1024))
    with closing(engine.passages):
        assert precompute(engine, documents, WINDOWS) > 0
    (record,) = caplog.records
    assert "not keep all of the 6 computed passages (disk: 0 errors, 2 entries); raise " in record.getMessage()


def test_of_two_lasting_tiers_one_is_enough(loaded, tmp_path):
    class Refusing(MemoryTier):
        name, is_synchronous = "refusing", False

        def put_many(self, entries):
            raise OSError("full")

    engine = engine_of(loaded, Refusing(), DiskTier(tmp_path, KVCodec(), max_bytes=10**8))
    with closing(engine.passages):
        assert precompute(engine, DOCUMENTS, WINDOWS) == before_suffix(layout_of())


def test_nothing_is_lost_where_the_queue_of_the_store_is_short(loaded, tmp_path):
    token = 2 * 2 * 2 * 8 * 4  # keys and values x L x Hkv x D x bytes of float32
    room = len(layout_of().prefix) + 42  # the passages have 30, 41, 26 and 16
    engine = engine_of(loaded, DiskTier(tmp_path, KVCodec(), max_bytes=10**8), queue_bytes=room * token)
    with closing(engine.passages):
        seen = []
        precompute(engine, DOCUMENTS, WINDOWS, progress=lambda *at: seen.append(at))
        assert engine.passages.stats()["dropped_writes"] == 0
        assert seen == [(1, 4), (2, 4), (4, 4)], "as many at once as there is room for"
        assert cached(engine, layout_of()) == before_suffix(layout_of())


def test_tenants_do_not_share_what_was_read_ahead(loaded):
    engine = engine_of(loaded)
    precompute(engine, DOCUMENTS, WINDOWS, salt="one")
    assert cached(engine, layout_of(), salt="one") == before_suffix(layout_of())
    assert cached(engine, layout_of(), salt="two") == cached(engine, layout_of()) == 0


def test_passages_are_found_after_earlier_messages_unless_history_is_first(loaded):
    engine = engine_of(loaded)
    precompute(engine, DOCUMENTS, WINDOWS)
    talk = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]
    assert cached(engine, layout_of(history=talk, template=PromptTemplate(history_first=True))) == 0
    assert cached(engine, layout_of(history=talk)) == before_suffix(layout_of())
    assert cached(engine, layout_of()) == before_suffix(layout_of())


def test_the_words_of_the_prompt_are_part_of_what_is_read(loaded):
    template = PromptTemplate(instruction="Answer.", separator="\n")
    engine = engine_of(loaded)
    precompute(engine, DOCUMENTS, WINDOWS, template=template)
    assert cached(engine, layout_of()) == 0
    assert cached(engine, layout_of(template=template)) == before_suffix(layout_of(template=template))


def test_what_is_deleted_after_the_documents_were_read_is_not_kept(loaded, tmp_path):
    engine = engine_of(loaded, MemoryTier(), DiskTier(tmp_path, KVCodec()))
    gone = content_key(DOCUMENTS[1])
    with engine.passages.begin():
        engine.passages.drop([gone])
        precompute(engine, DOCUMENTS, MitigationChoice("context_experts"))
    assert engine.passages.flush()
    assert gone not in engine.passages.memory_tags()
    assert content_key(DOCUMENTS[0]) in engine.passages.memory_tags()
    assert engine.passages.drop([gone]) == 0
    engine.passages.close()
