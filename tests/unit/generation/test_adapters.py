"""Adapters: merged where a model is loaded, part of its identity, and never mixed with their base in a cache."""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import closing

import pytest
import torch
import transformers
from langchain_core.documents import Document

from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError
from rag_posfix.generation.load import load_engine, read_metadata
from rag_posfix.pipeline.build import build_generator, build_pipeline
from rag_posfix.pipeline.pipeline import Question
from rag_posfix.plan.layout import Layout
from rag_posfix.settings import Settings
from tests.support.tiny import save_tiny, toy_layout
from tests.support.tiny_training import SETTINGS, tiny_folders, tiny_tune

DOCUMENTS = [Document(page_content=text, id=text[0]) for text in ("a river", "b lake", "c hill")]
LAYOUT = toy_layout()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    # Of 20 and more linear layers peft writes names alone; of fewer the layers too, which larger models have.
    return tiny_folders(tmp_path_factory.mktemp("adapters"), layers=3)


@pytest.fixture(scope="module")
def adapter(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    settings = dataclasses.replace(SETTINGS, steps=3, evaluate_every=3, learning_rate=0.02)
    return tiny_tune(*folders, out, settings=settings).files["adapter"]


def engine_of(folders, adapter=None):
    return load_engine(str(folders[0]), dtype="float32", device="cpu", adapter=adapter)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft's own
def test_a_merged_adapter_computes_what_peft_computes_apart(folders, adapter):
    from peft import PeftModel

    base = engine_of(folders)
    before = base.next_log_probs(LAYOUT)
    merged = engine_of(folders, adapter).next_log_probs(LAYOUT)
    assert not torch.allclose(merged, before, atol=1e-3)
    PeftModel.from_pretrained(base.loaded.model, str(adapter))  # adds LoRA beside the weights of the same model
    torch.testing.assert_close(base.next_log_probs(LAYOUT), merged, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")  # peft warns of tied matrices
@pytest.mark.parametrize("extra", [{}, {"ensure_weight_tying": True}], ids=["apart", "tied"])
@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["q_proj", "embed_tokens", "lm_head"]])
def test_lora_on_a_matrix_that_input_and_output_share_computes_what_peft_computes_apart(tmp_path, targets, extra):
    adapted = save_adapter(tmp_path, targets, **extra)
    engine = load_engine(str(tmp_path / "tiny"), dtype="float32", device="cpu", adapter=tmp_path / "adapter")
    with torch.no_grad():
        expected = adapted(torch.tensor([LAYOUT.token_ids])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(engine.next_log_probs(LAYOUT), expected, atol=1e-4, rtol=0)
    assert not engine.loaded.model.config.tie_word_embeddings


def save_adapter(folder, targets, **settings):
    """Write a tiny model with tied embeddings and random LoRA on ``targets``; return them as peft runs them."""
    from peft import LoraConfig, get_peft_model

    save_tiny(folder / "tiny", tie_word_embeddings=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **settings)).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder / "adapter")
    return adapted


def test_an_adapter_is_part_of_name_and_fingerprint_wherever_it_lies(folders, adapter, tmp_path):
    base, tuned = engine_of(folders), engine_of(folders, adapter)
    assert (base.model_id, tuned.model_id) == ("tiny", "tiny+adapter")
    assert tuned.fingerprint != base.fingerprint
    copy = shutil.copytree(adapter, tmp_path / "copy")
    assert engine_of(folders, copy).fingerprint == tuned.fingerprint
    facts = read_metadata(str(folders[0]), dtype="float32", device="cpu", cache_dir=tmp_path, adapter=adapter)
    assert (facts.name, facts.fingerprint) == ("tiny+adapter", tuned.fingerprint)
    weights = copy / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert engine_of(folders, copy).fingerprint != tuned.fingerprint


def test_an_adapter_and_its_base_share_no_keys_and_values(folders, adapter):
    store = PassageStore([MemoryTier(2**24)], device=torch.device("cpu"))

    def cached(engine):
        request = GenerationRequest(LAYOUT, MitigationChoice("parallel_windows"), Sampling(max_tokens=1))
        return engine.with_passages(store).generate(request).usage.cached_tokens

    base, tuned = engine_of(folders), engine_of(folders, adapter)
    assert [cached(base), cached(tuned)] == [0, 0]
    assert cached(base) > 0
    assert cached(tuned) > 0


@pytest.mark.slow
def test_an_adapter_and_its_base_share_no_cached_answers(folders, adapter, tmp_path):
    common = {
        "model": str(folders[0]),
        "dtype": "float32",
        "device": "cpu",
        "cache_dir": tmp_path,
        "max_tokens": 2,
        "keep_on_disk": True,
    }
    seen = []
    for chosen in (None, adapter, None, adapter):
        for deferred in (False, True):
            with closing(build_pipeline(Settings(adapter=chosen, **common), deferred=deferred)) as built:
                seen.append(built.ask(Question("Which?", DOCUMENTS)).cached)
    assert seen == [False, True, False, True, True, True, True, True]


def test_the_adapter_of_the_settings_comes_from_the_environment(folders, adapter, monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_ADAPTER", str(adapter))
    found = Settings(model=str(folders[0]), dtype="float32", device="cpu")
    assert build_generator(found).model_id == "tiny+adapter"


def test_an_adapter_that_cannot_be_used_is_told(folders, adapter, tmp_path):
    with pytest.raises(ConfigError, match=r"holds no adapter_config\.json"):
        engine_of(folders, tmp_path)
    pickled = shutil.copytree(adapter, tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"holds no adapter_model\.safetensors"):
        engine_of(folders, pickled)
    other = shutil.copytree(adapter, tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "PREFIX_TUNING"}))
    with pytest.raises(ConfigError, match="PREFIX_TUNING"):
        engine_of(folders, other)
    (other / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        engine_of(folders, other)


@pytest.mark.parametrize("changes", [{"hidden_size": 32}, {"num_hidden_layers": 4}, {"num_hidden_layers": 2}])
def test_an_adapter_of_another_model_is_refused(adapter, tmp_path, changes):
    other = save_tiny(tmp_path / "other", **changes)
    with pytest.raises(ConfigError, match="does not fit this model"):
        load_engine(str(other), dtype="float32", device="cpu", adapter=adapter)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"tp": 2}, "use tp=1"), ({"model": "openai:x@http://127.0.0.1:9/v1"}, "is on a server")],
)
def test_an_adapter_needs_the_whole_weights_in_this_process(folders, adapter, changes, said):
    settings = Settings(**{"model": str(folders[0]), "adapter": adapter, "mitigation": "none", **changes})
    with pytest.raises(ConfigError, match=said):
        build_pipeline(settings)


def add_tokens(folder, *names):
    """Return the tokenizer of a folder with special tokens added, and a chat template that writes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    tokenizer.chat_template = "{% for m in messages %}" + names[0] + "{{ m.content }}{% endfor %}"
    return tokenizer


@pytest.mark.filterwarnings("ignore")  # peft warns of tied matrices
@pytest.mark.parametrize("whole", [True, False], ids=["its tokenizer", "its template alone"])
def test_the_template_of_an_adapter_takes_the_place_of_the_models(tmp_path, whole):
    save_adapter(tmp_path, ["q_proj"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tiny")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path / "adapter")
    if not whole:
        (tmp_path / "adapter" / "tokenizer.json").unlink()
    options = {"dtype": "float32", "device": "cpu", "adapter": tmp_path / "adapter"}
    engine = load_engine(str(tmp_path / "tiny"), **options)
    chat = [{"role": "user", "content": "Who?"}]
    assert engine.encoder.render_chat(chat) == "[user] Who? "
    unread = read_metadata(str(tmp_path / "tiny"), cache_dir=tmp_path, **options)
    assert unread.tokenizer.render_chat(chat) == "[user] Who? "


@pytest.mark.filterwarnings("ignore")  # peft warns of saved embeddings
def test_an_adapter_that_brings_new_rows_of_embeddings_computes_what_peft_computes(tmp_path):
    from peft import LoraConfig, get_peft_model

    save_tiny(tmp_path / "tiny")
    tokenizer = add_tokens(tmp_path / "tiny", "<|user|>", "<|end|>")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32)
    torch.manual_seed(3)
    base.resize_token_embeddings(len(tokenizer))
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokenizer.save_pretrained(tmp_path / "adapter")
    engine = load_engine(str(tmp_path / "tiny"), dtype="float32", device="cpu", adapter=tmp_path / "adapter")
    ids = (len(tokenizer) - 2, *LAYOUT.token_ids)  # <|user|>
    with torch.no_grad():
        expected = adapted(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(engine.next_log_probs(Layout.plain(ids)), expected, atol=1e-4, rtol=0)


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused_if_prompts_may_hold_them(tmp_path):
    save_tiny(tmp_path)
    tokenizer = add_tokens(tmp_path, "<|user|>", "<|unused|>")
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"131 rows.*'<\|user\|>' is 131\).*resize_token_embeddings"):
        load_engine(str(tmp_path), dtype="float32", device="cpu")
    tokenizer.chat_template = None  # no prompt holds either; Gemma 3 has such a token for images
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert load_engine(str(tmp_path), dtype="float32", device="cpu").encoder.writable_from(131) == []


@pytest.mark.filterwarnings("ignore")
def test_a_broken_tokenizer_of_an_adapter_is_one_line_that_says_what_to_do(tmp_path):
    save_adapter(tmp_path, ["q_proj"])
    (tmp_path / "adapter" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="save it again, or remove its files") as caught:
        load_engine(str(tmp_path / "tiny"), dtype="float32", device="cpu", adapter=tmp_path / "adapter")
    assert "\n" not in str(caught.value)
