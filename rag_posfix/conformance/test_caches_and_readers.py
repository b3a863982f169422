"""What cache backends and file readers promise: entries come back, deletions delete, damage is a miss; text."""

from __future__ import annotations

from typing import Any

import pytest

from rag_posfix.caching.answers.tiered import Blob, BlobCodec, TieredAnswerCache
from rag_posfix.caching.tier import TIERS
from rag_posfix.conformance.models import plugins
from rag_posfix.contracts.method_spec import MethodSpec

of_each_backend = pytest.mark.parametrize(("name", "cls"), plugins("cache backend"))


def tier_of(name: str, cls: Any) -> Any:
    return TIERS.create(MethodSpec(name, getattr(cls, "example", {})), {"codec": BlobCodec})


@of_each_backend
def test_entries_come_back_and_are_deleted_by_tag(name: str, cls: Any) -> None:
    cache = TieredAnswerCache([tier_of(name, cls)])
    try:
        cache.put("key", {"text": "Paris"}, ["document"])
        cache.put("other", {"text": "Rome"}, ["another"])
        assert cache.get("key") == {"text": "Paris"}
        assert cache.get("missing") is None
        cache.drop_documents(["document"])
        assert cache.get("key") is None
        assert cache.get("other") == {"text": "Rome"}
        assert [tier["name"] for tier in cache.stats()["tiers"]] == [name]
        cache.clear()
        assert cache.get("other") is None
    finally:
        cache.close()


@of_each_backend
def test_after_close_each_look_up_is_a_miss(name: str, cls: Any) -> None:
    tier = tier_of(name, cls)
    tier.put_many({"key": Blob(b"value")})
    tier.close()
    assert tier.get_many({"key": None}) == {}


@pytest.mark.parametrize(("name", "read"), plugins("file reader"))
def test_a_file_reader_has_a_suffix_for_its_name_and_takes_a_path(name: str, read: Any) -> None:
    assert name == name.lower().strip("."), "the name is the suffix in lower case, without the dot"
    assert callable(read)
