import json
import logging

import pytest

from rag_posfix.contracts.request import GenerationRequest, Sampling
from rag_posfix.errors import ConfigError
from rag_posfix.generation import load as module
from rag_posfix.generation.load import generation_config_of, load_engine, read_metadata
from rag_posfix.generation.model.checkpoint import read_generation_config
from tests.support.tiny import save_tiny, toy_layout

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


@pytest.fixture
def tiny(tmp_path):
    """A model of letters whose tokenizer ends an answer with token 2."""
    return save_tiny(tmp_path / "tiny")


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


def test_a_damaged_file_is_refused_where_transformers_would_do_without(tiny):
    (tiny / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read: "):
        load(tiny)


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
    with caplog.at_level(logging.INFO, logger=module.__name__):
        load(tiny)
    messages = [record.getMessage() for record in caplog.records if record.name == module.__name__]
    assert [message for message in messages if "not applied" in message] == [
        "settings of its generation config that are not applied: {'repetition_penalty': 1.05, 'top_k': 20}"
    ]
