import pytest

from rag_posfix.checkpoints import folder_of
from rag_posfix.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class TestFolderOf:
    @pytest.fixture(autouse=True)
    def hub(self, tmp_path, monkeypatch):
        """A cache of the Hub with two commits of a model, of which main is the second."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        model = tmp_path / "models--somebody--tiny"
        for commit in (COMMIT[::-1], COMMIT):
            (model / "snapshots" / commit).mkdir(parents=True)
            (model / "snapshots" / commit / "config.json").write_text("{}")
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(COMMIT)
        return tmp_path

    @pytest.fixture
    def snapshot(self, hub):
        return hub / "models--somebody--tiny" / "snapshots" / COMMIT

    def test_an_id_has_the_folder_of_the_commit_of_the_main_branch(self, snapshot):
        assert folder_of("somebody/tiny") == snapshot

    def test_a_model_that_the_cache_does_not_have_is_refused_with_what_to_do(self):
        with pytest.raises(ConfigError, match=r"'somebody/other' are not in the cache .* download .* give its folder"):
            folder_of("somebody/other")

    def test_a_folder_is_its_own(self, tmp_path):
        assert folder_of(str(tmp_path)) == tmp_path
