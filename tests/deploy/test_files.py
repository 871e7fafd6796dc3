"""Files that are replaced while a process runs."""

from __future__ import annotations

import logging

import pytest

from core.errors import ConfigError
from deploy.files import ReloadedFiles


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("first")
    return path


class Reader:
    """Reads one file, and counts how often."""

    def __init__(self, path):
        self.path = path
        self.num_reads = 0

    def __call__(self):
        self.num_reads += 1
        if not self.path.exists():
            raise ConfigError("the file is gone")
        return self.path.read_text()


def test_a_file_is_read_again_once_for_each_change(secret, caplog):
    caplog.set_level(logging.INFO)
    reader = Reader(secret)
    reloaded = ReloadedFiles([secret], reader, "the old one stays", "a new one is in use")
    assert [reloaded.now() for _ in range(3)] == ["first"] * 3
    assert reader.num_reads == 1
    secret.write_text("another")
    assert [reloaded.now() for _ in range(3)] == ["another"] * 3
    assert reader.num_reads == 2
    assert [record.message for record in caplog.records] == ["a new one is in use"]


def test_what_cannot_be_read_changes_nothing_and_is_told_of_once(secret, caplog):
    reloaded = ReloadedFiles([secret], Reader(secret), "the old one stays")
    secret.unlink()
    assert [reloaded.now() for _ in range(3)] == ["first"] * 3
    assert [record.message for record in caplog.records] == ["the old one stays: the file is gone"]
    secret.write_text("back")
    assert reloaded.now() == "back"
