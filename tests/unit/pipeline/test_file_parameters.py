import json
import os

import pytest

from rag_posfix.assembly.orders import ORDERS, create_order
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.pipeline.file_parameters import order_with_values, with_file_parameters
from rag_posfix.plan.bias_profile import FILE_BYTES
from rag_posfix.reranking import RERANKERS

CHANNEL = {"channel": 5, "factor": -1.0, "layers": [1, 2], "candidates": [{"channel": 5}]}


@pytest.fixture
def write(tmp_path):
    def written(content, name="profile.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return written


def mitigation(name, **parameters):
    return with_file_parameters(MethodSpec(name, parameters), MITIGATIONS)


@pytest.mark.parametrize("content", [{"profile": [4, 2, 6], "n": 3}, [4, 2, 6]])
def test_a_slot_profile_becomes_its_numbers(write, content):
    path = write(content)
    assert mitigation("calibrated_attention", profile=path).parameters == {"profile": (4, 2, 6)}
    assert with_file_parameters(MethodSpec("calibrated_attention", {"profile": path}), RERANKERS).parameters == {
        "profile": (4, 2, 6)
    }
    assert with_file_parameters(MethodSpec("profile", {"file": path}), ORDERS).parameters == {"slots": (4, 2, 6)}


def test_an_order_as_text_holds_the_numbers_of_its_file(write):
    order = order_with_values(f"profile:file={write([0.1, 0.9])}")
    assert create_order(order).slots == (0.1, 0.9)
    assert order_with_values("relevance") == "relevance"
    assert order_with_values("profile:slots=[1,2]") == "profile:slots=[1, 2]"


def test_a_channel_profile_gives_all_parameters(write):
    read = mitigation("hidden_scaling", profile=write(CHANNEL))
    given = create("hidden_scaling", {"channel": 5, "factor": -1.0, "first_layer": 1, "last_layer": 2})
    assert MITIGATIONS.create(read) == given
    assert MITIGATIONS.create(read).fingerprint() == given.fingerprint()


def test_the_fingerprint_follows_the_content_of_a_profile_not_its_path(write):
    prints = []
    for name, channel in (("a", 5), ("b", 5), ("a", 6)):
        read = mitigation("hidden_scaling", profile=write({**CHANNEL, "channel": channel}, name))
        prints.append(MITIGATIONS.create(read).fingerprint())
    assert prints[0] == prints[1] != prints[2]


def test_values_and_methods_without_files_stay_as_they_are():
    assert mitigation("calibrated_attention", profile=[1, 2]).parameters == {"profile": [1, 2]}
    assert mitigation("none").parameters == {}
    assert mitigation("pine").name == "inter_document"


def test_methods_of_a_stack_may_name_files_too(write):
    path = write([4, 2, 6])
    escaped = json.dumps({"name": "calibrated_attention", "profile": path}).replace("profile", "\\u0070rofile", 1)
    for member in ({"name": "calibrated_attention", "profile": path}, escaped):
        read = mitigation("stack", methods=[member, "none"])
        assert read.parameters["methods"] == [{"name": "calibrated_attention", "profile": (4, 2, 6)}, "none"]
        assert MITIGATIONS.create(read).methods[0] == json.dumps(
            {"name": "calibrated_attention", "profile": [4, 2, 6]}
        )


def test_what_is_no_method_of_a_stack_is_left_for_the_stack_to_refuse():
    for member in (3, "{", '{"a": 1}', {"low": 1.0}):
        assert mitigation("stack", methods=[member]).parameters["methods"] == [member]


@pytest.mark.parametrize(
    ("method", "content", "message"),
    [
        ("calibrated_attention", "[1, 2", "is no JSON"),
        ("calibrated_attention", "[" * 60_000, "is no JSON"),
        ("calibrated_attention", '{"profile": ' + "9" * 70_000, "is no JSON"),
        ("calibrated_attention", {"other": [1, 2]}, "holds no profile"),
        ("calibrated_attention", {"profile": "[1, 2]"}, "holds no profile"),
        ("calibrated_attention", "3", "holds no profile"),
        ("calibrated_attention", "[" + "1," * FILE_BYTES + "1]", f"more than {FILE_BYTES} bytes"),
        ("hidden_scaling", [], "is no channel profile"),
        ("hidden_scaling", {"channel": 5, "layers": [1, 2]}, "is no channel profile"),
        ("hidden_scaling", {**CHANNEL, "layers": [1]}, "is no channel profile"),
        ("hidden_scaling", {**CHANNEL, "layers": 3}, "is no channel profile"),
    ],
    ids=range(11),
)
def test_a_file_that_holds_something_else_is_refused(write, method, content, message):
    with pytest.raises(ConfigError, match=rf"profile\.json' .*{message}"):
        mitigation(method, profile=write(content))


def test_values_of_a_file_are_checked_by_the_method(write):
    for changes in ({"channel": "five"}, {"factor": None}, {"layers": [2, 1]}):
        with pytest.raises(ConfigError, match="hidden_scaling: "):
            MITIGATIONS.create(mitigation("hidden_scaling", profile=write({**CHANNEL, **changes})))


def test_only_regular_files_are_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (str(tmp_path), "/dev/zero", str(pipe)):
        with pytest.raises(ConfigError, match=r"is not a regular file|cannot be read"):
            mitigation("hidden_scaling", profile=path)
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        mitigation("hidden_scaling", profile=str(tmp_path / "absent"))


def test_a_profile_and_what_it_gives_exclude_each_other(write):
    with pytest.raises(ConfigError, match="gives channel, factor already; leave out one of the two"):
        mitigation("hidden_scaling", profile=write(CHANNEL), channel=3, factor=0.5)
