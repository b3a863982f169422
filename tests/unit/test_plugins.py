"""Plug-ins: entries of other packages, found by entry points, and of modules that a user names."""

import json
import os
import sys
import textwrap

import pytest

from rag_posfix.assembly.orders import ORDERS
from rag_posfix.caching.answers.tiered import build_answer_cache
from rag_posfix.caching.tier import TIERS
from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.registry import Registry, entry_points_of, import_modules, plugin_entries
from rag_posfix.retrieval.ingest.ingest import read_documents
from rag_posfix.retrieval.ingest.readers import READERS
from rag_posfix.settings import CacheSettings, Settings, plugin_modules
from tests.support.command_line import command_line


@pytest.fixture(autouse=True)
def _no_entry_stays():
    """What a test registers is gone with it."""
    registries = (ORDERS, READERS, TIERS)
    saved = [
        {name: dict(value) for name, value in vars(each).items() if isinstance(value, dict)} for each in registries
    ]
    yield
    for each, before in zip(registries, saved, strict=True):
        for name, value in before.items():
            vars(each)[name].clear()
            vars(each)[name].update(value)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package: its module and its entry points by group."""

    def install(name, code, points):
        folder = tmp_path / "site"
        metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir(parents=True)
        module = name.replace("-", "_")
        (folder / f"{module}.py").write_text(textwrap.dedent(code))
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[{group}]\n{entries}\n" for group, entries in points.items()]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


ORDERS_CODE = """
    class First:
        name = "first"

    def second():
        "A function is an entry too."
"""


def orders(**entries):
    registry = Registry("order")
    for name, entry in entries.items():
        registry.register(name)(entry)
    return registry


def test_entry_points_are_listed_without_importing_their_package(package):
    package("posfix-a", "raise RuntimeError", {"rag_posfix.orders": "first = posfix_a:First"})
    (point,) = [point for point in entry_points_of("order") if point.name == "first"]
    assert (point.value, point.dist.name) == ("posfix_a:First", "posfix-a")
    assert "posfix_a" not in sys.modules


def test_an_unknown_name_is_looked_for_in_packages_and_known_names_import_none(package):
    package("posfix-b", ORDERS_CODE, {"rag_posfix.orders": "first = posfix_b:First\nsecond = posfix_b:second"})
    registry = orders(own=str)
    assert registry.get("own") is str
    assert "own" in registry
    assert "posfix_b" not in sys.modules
    assert registry.get("first").__module__ == "posfix_b"
    assert registry.names() == ("first", "own", "second")
    assert [registry.package(name) for name in registry.names()] == ["posfix-b", "builtins", "posfix-b"]


def test_a_package_that_cannot_be_imported_stops_no_other_and_is_named_where_its_entry_is_sought(package, caplog):
    package("posfix-c", "import missing_module", {"rag_posfix.orders": "broken = posfix_c:Nothing"})
    package("posfix-d", ORDERS_CODE, {"rag_posfix.orders": "first = posfix_d:First"})
    registry = orders()
    assert registry.names() == ("first",)
    message = (
        "the plug-in 'broken' of the package posfix-c (posfix_c:Nothing) cannot be imported: ModuleNotFoundError: No "
        "module named 'missing_module'; repair or uninstall the package"
    )
    with pytest.raises(ConfigError) as caught:
        registry.get("broken")
    assert str(caught.value) == message
    assert message in caplog.text
    with pytest.raises(UnknownNameError, match="unknown order 'brokem'"):
        registry.get("brokem")


def test_a_package_cannot_replace_an_entry_that_is_there(package):
    package("posfix-e", ORDERS_CODE, {"rag_posfix.orders": "own = posfix_e:First"})
    registry = orders(own=str)
    assert registry.names() == ("own",)
    assert registry.get("own") is str


FILE_ORDER = """
    from dataclasses import dataclass
    from rag_posfix.assembly.orders import ORDERS, Order

    @ORDERS.register("{name}")
    @dataclass(frozen=True)
    class AsGiven(Order):
        "Keep the order."
        name = "{name}"

        def __call__(self, inputs):
            return tuple(range(len(inputs.relevance)))
"""


def order_file(folder, name):
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(FILE_ORDER.format(name=name)))
    return path


def test_a_file_is_imported_once_and_its_entries_have_its_name_as_package(tmp_path):
    path = order_file(tmp_path, "as_given_one")
    import_modules([str(path), str(path)])
    assert ("as_given_one", "as_given_one.py") in [(name, package) for name, _, package in plugin_entries("order")]
    assert Settings(order="as_given_one").order == "as_given_one"


@pytest.mark.parametrize(
    ("name", "problem"),
    [("missing.py", "FileNotFoundError"), ("no_such_module", "ModuleNotFoundError"), ("bad.py", "ZeroDivisionError")],
)
def test_a_module_that_cannot_be_imported_is_refused(tmp_path, monkeypatch, name, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=f"^the plug-in '{name}' cannot be imported: {problem}: .*; give a module"):
        import_modules([name])


def test_the_variable_is_read_with_the_settings_and_not_the_configuration_file(tmp_path, monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_PLUGINS", str(order_file(tmp_path, "as_given_two")))
    monkeypatch.setenv("RAG_POSFIX_ORDER", "as_given_two")
    assert Settings().order == "as_given_two"
    (tmp_path / "rag-posfix.toml").write_text(f'plugins = ["{order_file(tmp_path, "as_given_three")}"]')
    monkeypatch.setenv("RAG_POSFIX_CONFIG", str(tmp_path / "rag-posfix.toml"))
    with pytest.raises(ConfigError, match="plugins is not a setting"):
        Settings()


def test_an_option_adds_to_the_variable_for_the_processes_that_are_started(tmp_path, monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_PLUGINS", "json")
    path = str(order_file(tmp_path, "as_given_four"))
    with plugin_modules([path]):
        assert os.environ["RAG_POSFIX_PLUGINS"] == f"json,{path}"
    assert os.environ["RAG_POSFIX_PLUGINS"] == "json"


def test_the_list_of_methods_has_the_plugins_of_the_variable(tmp_path, monkeypatch, capsysbinary):
    monkeypatch.setenv("RAG_POSFIX_PLUGINS", str(order_file(tmp_path, "as_given_nine")))
    code, out, _ = command_line(capsysbinary)("methods", "--json")
    listed = json.loads(out)
    assert (code, "as_given_nine" in listed["orders"]) == (0, True)
    assert {"kind": "order", "name": "as_given_nine", "package": "as_given_nine.py"} in listed["plugins"]


def test_the_command_line_takes_a_file_and_lists_its_entries_with_their_package(tmp_path, capsysbinary):
    run = command_line(capsysbinary)
    path = order_file(tmp_path, "as_given_five")
    code, out, _ = run("methods", "--plugin", path, "--json")
    listed = json.loads(out)
    assert (code, "as_given_five" in listed["orders"]) == (0, True)
    assert {"kind": "order", "name": "as_given_five", "package": "as_given_five.py"} in listed["plugins"]
    assert {entry["package"] for entry in listed["mitigations"]} == {"rag-posfix"}
    _, out, _ = run("methods")
    assert "plug-in: order as_given_five (as_given_five.py)" in out


def test_a_command_knows_the_names_of_a_file_that_is_named_after_it(tmp_path, capsysbinary):
    run = command_line(capsysbinary)
    asked = ["ask", "Who?", "--index", tmp_path / "missing", "--order", "as_given_six", "--json"]
    assert "unknown order 'as_given_six'" in json.loads(run(*asked)[1])["error"]["message"]
    code, out, _ = run(*asked, "--plugin", order_file(tmp_path, "as_given_six"))
    assert (code, "there is no folder" in json.loads(out)["error"]["message"]) == (1, True)


def test_a_file_reader_gives_the_text_of_files_with_its_suffix(tmp_path):
    def read(path):
        return f"# Notes\n\n{path.read_text()[::-1]}"

    READERS.register("rev")(read)
    (tmp_path / "a.REV").write_text(".setunim evif skaos tI")
    (document,) = read_documents(tmp_path / "a.REV")
    assert (document.page_content, document.metadata["title"]) == ("It soaks five minutes.", "Notes")
    assert [found.page_content for found in read_documents(tmp_path)] == [document.page_content]


@pytest.mark.parametrize(("result", "problem"), [(None, "returned NoneType, must be text"), (1 / 1, "returned float")])
def test_a_file_reader_that_gives_no_text_is_an_error_of_that_file(tmp_path, result, problem):
    name = f"bad{type(result).__name__}".lower()
    READERS.register(name)(lambda path: result)
    (tmp_path / f"a.{name}").write_text("x")
    from rag_posfix.errors import RetrievalError

    with pytest.raises(RetrievalError, match=problem):
        read_documents(tmp_path / f"a.{name}")


def test_a_cache_backend_is_a_further_tier_by_its_name_and_parameters(tmp_path):
    from dataclasses import dataclass, field

    from rag_posfix.caching.tier import TierStats

    @TIERS.register("shelf")
    @dataclass
    class Shelf:
        codec: object
        label: str = "a"
        name: str = field(default="shelf", init=False)
        is_synchronous: bool = field(default=True, init=False)
        entries: dict = field(default_factory=dict, init=False)

        def get_many(self, keys):
            data = {key: self.entries[key] for key in keys if key in self.entries}
            return {key: self.codec.decode(key, content, None) for key, content in data.items()}

        def put_many(self, entries):
            self.entries |= {key: b"".join(self.codec.encode(key, entry)) for key, entry in entries.items()}

        def stats(self):
            return TierStats(self.name, entries=len(self.entries))

        def close(self):
            self.entries.clear()

    cache = build_answer_cache(CacheSettings(memory_entries=0, backend="shelf:label=b"), tmp_path)
    cache.put("key", {"text": "Paris"})
    assert cache.get("key") == {"text": "Paris"}
    assert [(tier["name"], tier["entries"]) for tier in cache.stats()["tiers"]] == [("shelf", 1)]
    cache.close()
    with pytest.raises(ConfigError, match="cache backend shelf has no parameter 'labell'"):
        build_answer_cache(CacheSettings(backend="shelf:labell=b"), tmp_path)
    with pytest.raises(UnknownNameError, match="unknown cache backend 'shelff'"):
        build_answer_cache(CacheSettings(backend="shelff"), tmp_path)
