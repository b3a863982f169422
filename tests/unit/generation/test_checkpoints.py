"""Checkpoints that transformers loads with random, ignored or misread weights are refused; whole ones are loaded."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.generation.load import load_engine, read_metadata
from tests.support.tiny import COMMON, save_tiny, stock_model, toy_layout

transformers = pytest.importorskip("transformers")

LAYER = 9
"""Tensors of a layer of Llama: four projections of attention, three of the MLP, two norms."""


def edited(folder, change=lambda weights: None, **config):
    """Change the tensors and the configuration of a saved model."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, **config}))
    return folder


def over(folder, model):
    """Save a model over the tiny one, whose tokenizer stays."""
    model.save_pretrained(folder)
    return folder


def load(folder, **options):
    return load_engine(str(folder), **{"dtype": "float32", "device": "cpu", **options})


def without(*beginnings):
    def change(weights):
        for name in [name for name in weights if name.startswith(beginnings)]:
            del weights[name]

    return change


def as_mlx(weights):
    """MLX packs eight weights into 32 bits and adds a scale and a bias to each group."""
    for name in [name for name in weights if name.endswith("proj.weight")]:
        rows, columns = weights[name].shape
        weights[name] = torch.zeros(rows, columns // 8, dtype=torch.uint32)
        stem = name.removesuffix("weight")
        weights |= {f"{stem}{part}": torch.zeros(rows, columns // 32) for part in ("scales", "biases")}


@pytest.fixture
def tiny(tmp_path):
    return save_tiny(tmp_path / "tiny")


class TestRefused:
    def refusal(self, folder):
        with pytest.raises(ConfigError) as caught:
            load(folder)
        message = str(caught.value)
        assert message.startswith(f"model {str(folder)!r} cannot be loaded: its files do not hold the weights of a ")
        assert "\n" not in message
        return message

    def test_a_missing_layer_is_counted_and_its_first_tensors_are_named(self, tiny):
        last = "model.layers.2."
        message = self.refusal(edited(tiny, without(last)))
        assert (
            f": {LAYER} missing ({last}input_layernorm.weight, {last}mlp.down_proj.weight, {last}mlp.gate_" in message
        )
        assert ", ...)" in message

    def test_a_tied_model_needs_the_embeddings_or_the_head(self, tmp_path):
        folder = save_tiny(tmp_path / "tied", tie_word_embeddings=True)
        message = self.refusal(edited(folder, without("model.embed_tokens", "lm_head")))
        assert ": 2 missing (lm_head.weight, model.embed_tokens.weight);" in message

    @pytest.mark.parametrize(("tied", "missing"), [(False, "1 missing (lm_head.weight), "), (True, "")])
    def test_a_reward_model_is_called_what_it_is(self, tiny, tied, missing):
        config = transformers.LlamaConfig(**COMMON, tie_word_embeddings=tied, num_labels=1)
        message = self.refusal(over(tiny, transformers.LlamaForSequenceClassification(config)))
        assert f": {missing}1 unexpected (score.weight); config.json calls it a LlamaForSequenceClass" in message

    def test_weights_of_mlx_are_not_read_as_random(self, tiny):
        stated = {"group_size": 32, "bits": 4}
        message = self.refusal(edited(tiny, as_mlx, quantization=stated))
        first = "model.layers.0.mlp.down_proj"
        assert f": 42 unexpected ({first}.biases, {first}.scales, " in message
        assert f", 21 of another shape ({first}.weight [64, 12] instead of [64, 96], " in message
        assert f"; transformers does not read its quantization {stated}" in message

    def test_norms_of_queries_and_keys_are_not_left_out(self, tmp_path):
        """The weights of Qwen3 are those of Llama, and a norm for queries and one for keys in each layer."""
        folder = save_tiny(tmp_path / "qwen3", family="qwen3")
        message = self.refusal(edited(folder, model_type="llama", architectures=["LlamaForCausalLM"]))
        norms = [f"model.layers.{layer}.self_attn.{head}_norm.weight" for layer in range(2) for head in "kq"][:3]
        assert f"LlamaForCausalLM: 6 unexpected ({', '.join(norms)}, ...)" in message

    def test_a_shard_without_its_tensors_is_told(self, tmp_path, tiny):
        stock_model().save_pretrained(tiny, max_shard_size="50KB")
        (tiny / "model.safetensors").unlink()
        index = json.loads((tiny / "model.safetensors.index.json").read_text())["weight_map"]
        name = "model.layers.1.mlp.up_proj.weight"
        shard = tiny / index[name]
        save_file({kept: value for kept, value in load_file(shard).items() if kept != name}, shard, {"format": "pt"})
        assert f": 1 missing ({name});" in self.refusal(tiny)

    @pytest.mark.parametrize("family", ["llama", "gemma", "llama3"])
    @pytest.mark.parametrize("value", [0.5, float("nan")])
    def test_rotary_frequencies_that_nothing_computed_are_refused(self, tmp_path, monkeypatch, family, value):
        folder = save_tiny(tmp_path / family, family=family)
        from_pretrained = transformers.AutoModelForCausalLM.from_pretrained

        def uninitialised(source, **options):
            model, report = from_pretrained(source, **options)
            model.model.rotary_emb.inv_freq.fill_(value)
            return model, report

        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", uninitialised)
        with pytest.raises(UnsupportedModelError, match=r"with a rotary_emb\.inv_freq that is not what its config"):
            load(folder)

    def test_a_scale_of_the_embeddings_that_nothing_computed_is_refused(self, tmp_path, monkeypatch):
        folder = save_tiny(tmp_path / "gemma", family="gemma")
        from_pretrained = transformers.AutoModelForCausalLM.from_pretrained

        def uninitialised(source, **options):
            model, report = from_pretrained(source, **options)
            model.model.embed_tokens.embed_scale.fill_(1.0)  # 8, the square root of 64, is right
            return model, report

        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", uninitialised)
        with pytest.raises(UnsupportedModelError, match=r"with a model\.embed_tokens\.embed_scale that is not what"):
            load(folder)


class TestLoaded:
    """What a checkpoint may leave out, hold too much of, or spread over files."""

    def same(self, folder, stock, dtype=torch.float32):
        """Load twice; both engines compute what the stock model computes, under one fingerprint."""
        first, second = load(folder), load(folder)
        assert first.fingerprint == second.fingerprint
        ids = torch.tensor([toy_layout().token_ids])
        expected = stock.to(dtype)(ids).logits
        for engine in (first, second):
            assert torch.equal(engine.loaded.model(input_ids=ids).logits, expected)

    @pytest.fixture(autouse=True)
    def _no_gradients(self):
        with torch.inference_mode():
            yield

    @pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3", "gemma", "phi3", "smollm3", "granite"])
    def test_two_loads_of_a_folder_are_one_model_under_one_fingerprint(self, tmp_path, family):
        self.same(save_tiny(tmp_path / family, family=family), stock_model(family))

    @pytest.mark.parametrize("left_out", ["lm_head", "model.embed_tokens"])
    def test_of_tied_weights_either_name_is_enough(self, tmp_path, left_out):
        stock = stock_model(tie_word_embeddings=True)
        folder = save_tiny(tmp_path / "tied", tie_word_embeddings=True)

        def change(weights):
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
            without(left_out)(weights)

        self.same(edited(folder, change), stock)

    def test_a_tied_base_model_lacks_nothing(self, tmp_path):
        stock = stock_model(tie_word_embeddings=True)
        folder = over(save_tiny(tmp_path / "tied"), stock.model)
        self.same(folder, stock)

    def test_shards_are_put_together(self, tiny):
        stock = stock_model()
        stock.save_pretrained(tiny, max_shard_size="50KB")
        (tiny / "model.safetensors").unlink()
        assert len(list(tiny.glob("model-*.safetensors"))) > 2
        self.same(tiny, stock)

    @pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"])
    @pytest.mark.parametrize("family", ["llama", "gemma3_text"])
    def test_stored_rotary_frequencies_are_computed_again(self, tmp_path, family, name):
        config = transformers.Gemma3TextConfig(**COMMON, head_dim=16)
        stock = stock_model() if family == "llama" else transformers.Gemma3ForCausalLM(config).eval()
        folder = over(save_tiny(tmp_path / family), stock)
        self.same(edited(folder, lambda weights: weights.update({name: torch.ones(4)})), stock)


class TestQuantised:
    def fp8(self, folder):
        """Quantise the projections of a saved model to 8 bits, all with a scale of a half for 128 x 128 weights."""

        def change(weights):
            for name in [name for name in weights if name.endswith("proj.weight")]:
                weights[name] = (weights[name] * 2).to(torch.float8_e4m3fn)
                weights[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)

        stated = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        return edited(folder, change, quantization_config=stated)

    @pytest.fixture
    def model(self, tmp_path):
        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
        return save_tiny(tmp_path / "fp8", **sizes)

    def test_weights_of_eight_bits_are_read_with_their_scales(self, model):
        expected = (load_file(model / "model.safetensors")["model.layers.0.mlp.up_proj.weight"] * 2).to(
            torch.float8_e4m3fn
        ).float() / 2  # fmt: skip
        engine = load(self.fp8(model))
        assert torch.equal(engine.loaded.model.model.layers[0].mlp.up_proj.weight, expected)

    def test_scales_of_another_dtype_are_an_error_that_says_what_to_do(self, model):
        """Without a GPU, transformers unpacks the weights in the dtype of their scales."""
        with pytest.raises(ConfigError) as caught:
            load(self.fp8(model), dtype="bfloat16")
        message = str(caught.value)
        assert message.startswith(f"model {str(model)!r} cannot run in bfloat16 on cpu: ")
        assert message.endswith("; use another dtype or device")


def failing(error):
    def fail(*_arguments, **_options):
        raise error

    return fail


class TestErrors:
    """Whatever a library raises, the error is one line of ours with the model and what to do."""

    @pytest.mark.parametrize("method", ["eval", "to"])
    def test_of_placing_the_model(self, tiny, monkeypatch, method):
        fail = failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        monkeypatch.setattr(transformers.LlamaForCausalLM, method, fail)
        with pytest.raises(ConfigError, match=r"cannot be loaded: CUDA out of memory.*; use a smaller or quantised"):
            load(tiny)

    def test_of_the_first_forward_pass(self, tiny, monkeypatch):
        monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", failing(RuntimeError("no kernel\nfor this")))
        with pytest.raises(ConfigError, match=r"cannot run in float32 on cpu: no kernel for this; use another dtype"):
            load(tiny)

    def test_of_the_configuration_without_the_weights(self, tiny, tmp_path):
        edited(tiny, num_attention_heads=0)
        for read in (load_engine, lambda *names, **options: read_metadata(*names, **options, cache_dir=tmp_path)):
            with pytest.raises(ConfigError) as caught:
                read(str(tiny), dtype="float32", device="cpu")
            assert str(caught.value).startswith(f"model {str(tiny)!r} cannot be loaded: ")
            assert "; give a folder, a Hub id, or one of smollm2, " in str(caught.value)


class TestAdapterBesideTheWeights:
    @pytest.fixture
    def both(self, tiny):
        (tiny / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "somebody/base"}')
        return tiny

    @pytest.mark.parametrize("installed", [True, False])
    def test_is_refused_with_and_without_peft(self, both, tmp_path, monkeypatch, installed):
        monkeypatch.setattr("transformers.utils.peft_utils.is_peft_available", lambda: installed)
        monkeypatch.setattr("transformers.integrations.peft.is_peft_available", lambda *_: installed)
        for read in (load_engine, lambda *names, **options: read_metadata(*names, **options, cache_dir=tmp_path)):
            with pytest.raises(ConfigError) as caught:
                read(str(both), dtype="float32", device="cpu")
            assert str(caught.value).startswith(f"model {str(both)!r} cannot be loaded: it holds adapter_config.json;")
            assert str(caught.value).endswith("pass that as adapter=, with model='somebody/base'")

    def test_is_refused_before_the_weights_are_read_if_it_names_no_base(self, both):
        (both / "adapter_config.json").write_text("{")
        (both / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"adapter_config.json; .* with model=the model that it"):
            load(both)

    def test_is_refused_in_a_repository_of_the_hub(self, both, tmp_path, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        repository = tmp_path / "hub" / "models--somebody--tuned"
        shutil.copytree(both, repository / "snapshots" / ("1" * 40))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("1" * 40)
        with pytest.raises(ConfigError, match=r"'somebody/tuned' cannot be loaded: it holds adapter_config.json"):
            load("somebody/tuned")
