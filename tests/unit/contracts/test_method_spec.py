import pytest

from rag_posfix.contracts.method_spec import parse_method
from rag_posfix.contracts.request import MitigationChoice


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (MitigationChoice("none"), "none"),
        (MitigationChoice("x", {"b": 1, "a": "two"}), "x:a=two:b=1"),
        (MitigationChoice("x", {"a": [1.0, 1.3], "b": None, "c": True}), "x:a=[1.0,1.3]:b=null:c=true"),
        (MitigationChoice("x", {"a": ["p", "q:r"]}), 'x:a=["p","q:r"]'),
        (MitigationChoice("x", {"a": "/some/path.json", "b": "p:q"}), 'x:a=/some/path.json:b="p:q"'),
        (MitigationChoice("x", {"a": "1", "b": "null", "c": ""}), 'x:a="1":b="null":c=""'),
    ],
)
def test_a_label_is_what_the_command_line_reads(choice, expected):
    assert choice.label == expected
    assert parse_method(expected, "method", "x=1") == choice
