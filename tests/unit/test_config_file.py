"""Settings in a file: what wins over it, and that no misspelled name is ignored, in the file or in the environment."""

import os
import traceback

import pytest

from rag_posfix.errors import ConfigError
from rag_posfix.settings import CacheSettings, RemoteSettings, ServiceSettings, Settings, config_file

FILE = """
model = "/models/from-file"
k = 4
min_relevance = 0.25
indexes = {a = "/data/a"}
passage_tokens = 100

[cache]
ttl_seconds = 60
redis_url = "redis://:hunter2@127.0.0.1/0"

[remote]
retries = 5

[service]
port = 9000
cors_origins = ["https://a.example"]
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Write a file of settings that this process reads."""

    def write(text):
        path = tmp_path / "rag-posfix.toml"
        path.write_text(text)
        monkeypatch.setenv("RAG_POSFIX_CONFIG", str(path))
        return path

    return write


def test_each_group_of_settings_reads_its_table_of_the_file(file, monkeypatch):
    file(FILE)
    monkeypatch.delenv("RAG_POSFIX_MODEL")  # that of the tests
    settings, service = Settings(), ServiceSettings()
    assert (settings.model, settings.k, settings.min_relevance) == ("/models/from-file", 4, "0.25")
    assert settings.cache == CacheSettings()
    assert (settings.cache.ttl_seconds, settings.cache.memory_entries) == (60, 1024)
    assert settings.cache.redis_url.get_secret_value() == "redis://:hunter2@127.0.0.1/0"
    assert settings.remote.retries == RemoteSettings().retries == 5
    assert (service.port, service.cors_origins) == (9000, ("https://a.example",))


def test_arguments_win_over_variables_and_variables_over_the_file(file, monkeypatch):
    file(FILE)
    monkeypatch.setenv("RAG_POSFIX_K", "5")
    monkeypatch.setenv("RAG_POSFIX_CACHE_TTL_SECONDS", "70")
    monkeypatch.setenv("RAG_POSFIX_INDEXES", '{"b": "/data/b"}')
    settings = Settings(model="argument")
    assert (settings.model, settings.k, settings.passage_tokens) == ("argument", 5, 100)
    assert settings.cache.ttl_seconds == 70
    assert list(settings.indexes) == ["b"], "a table of the file is replaced, not mixed with the variable"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('mitigaton = "none"', "mitigaton is not a setting; did you mean mitigation?"),
        ("[cache]\nttl_secnds = 1", "cache.ttl_secnds is not a setting; did you mean cache.ttl_seconds?"),
        ("[servce]\nport = 1", "servce is not a setting; did you mean service?"),
        ("[service]\nmodel = 1", "service.model is not a setting"),
        ("zzzzzzzzzz = 1", "zzzzzzzzzz is not a setting; correct or remove it"),
        ("cache = 1", "cache is a table of settings; write them below a line [cache]"),
        ("k = ", "is not TOML"),
        ("k = 0", ": k=0 must be"),
        ("[cache]\nmemory_entries = -1", ": cache.memory_entries=-1 must be"),
        ('[cache]\nredis_url = ["hunter2"]', ": cache.redis_url must be a valid string"),
        ('mitigation = "defalt"', "unknown mitigation 'defalt'"),
    ],
)
def test_a_wrong_key_or_value_of_the_file_is_refused_by_its_name(file, text, message):
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        Settings()
    assert message in str(caught.value)
    assert "unknown mitigation" in message or str(path) in str(caught.value)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_wrong_key_of_one_group_is_refused_when_another_one_is_read(file):
    file("[service]\nprot = 1")
    with pytest.raises(ConfigError, match=r"service\.prot is not a setting; did you mean service\.port\?"):
        CacheSettings()


def test_a_wrong_argument_is_named_as_an_argument_where_the_file_has_that_key_too(file):
    file(FILE)
    with pytest.raises(ConfigError, match=r"^setting k=0 must be"):
        Settings(k=0)


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv("RAG_POSFIX_CONFIG", str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"cannot be read .*; give another one to --config or RAG_POSFIX_CONFIG"):
        Settings()


def test_a_file_that_is_not_text_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.toml").write_bytes(b"k = \xff")
    monkeypatch.setenv("RAG_POSFIX_CONFIG", str(tmp_path / "a.toml"))
    with pytest.raises(ConfigError, match="is not TOML"):
        Settings()


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("RAG_POSFIX_MITIGATON", "RAG_POSFIX_MITIGATION"),
        ("rag_posfix_modell", "RAG_POSFIX_MODEL"),
        ("RAG_POSFIX_CACHE_TTL", "RAG_POSFIX_CACHE_TTL_SECONDS"),
        ("RAG_POSFIX_SERVICE_REQUIRE_KEYS", "RAG_POSFIX_SERVICE_REQUIRE_KEY"),
        ("RAG_POSFIX_SERVICE_PROT", "RAG_POSFIX_SERVICE_PORT"),
    ],
)
@pytest.mark.parametrize("kind", [Settings, CacheSettings, ServiceSettings])
def test_a_variable_that_is_no_setting_is_refused_with_the_nearest_one(monkeypatch, variable, nearest, kind):
    monkeypatch.setenv(variable, "secret")
    with pytest.raises(ConfigError, match=f"^{variable} is not a setting; did you mean {nearest}") as caught:
        kind()
    assert "secret" not in str(caught.value)


def test_a_variable_that_is_like_no_setting_is_refused_too(monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_ZZZZ", "1")
    with pytest.raises(ConfigError, match=r"^RAG_POSFIX_ZZZZ is not a setting; correct or unset it$"):
        Settings()


@pytest.mark.parametrize(
    "variable",
    [
        "RAG_POSFIX_KEY",
        "RAG_POSFIX_CACHE",
        "_RAG_POSFIX_COMPLETE",
        "RAG_POSFIX_PORT",
        "RAG_POSFIX_PORT_8000_TCP_ADDR",
        "RAG_POSFIX_SERVICE_PORT_HTTP",
        "RAG_POSFIX_REDIS_SERVICE_HOST",
    ],
)
def test_variables_of_other_programs_with_the_prefix_are_accepted(monkeypatch, variable):
    monkeypatch.setenv(variable, "{}")
    assert Settings().k == 10


def test_commands_read_the_file_of_the_working_folder_until_they_are_done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rag-posfix.toml").write_text("k = 4")
    assert Settings().k == 10, "a program of Python names its file"
    with config_file() as found:
        assert (str(found), Settings().k) == ("rag-posfix.toml", 4)
    assert "RAG_POSFIX_CONFIG" not in os.environ


def test_the_file_that_is_named_replaces_that_of_the_variable_and_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rag-posfix.toml").write_text("k = 4")
    (tmp_path / "b.toml").write_text("k = 5")
    (tmp_path / "c.toml").write_text("k = 6")
    monkeypatch.setenv("RAG_POSFIX_CONFIG", "b.toml")
    with config_file():
        assert Settings().k == 5
    with config_file(tmp_path / "c.toml"):
        assert Settings().k == 6
    assert os.environ["RAG_POSFIX_CONFIG"] == "b.toml"
    monkeypatch.setenv("RAG_POSFIX_CONFIG", "")
    with config_file():
        assert Settings().k == 10, "an empty variable turns the file of the folder off"
