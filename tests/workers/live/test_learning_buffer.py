"""The buffer is bounded, private, and never in the way, be its disk full or slow."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time

import pytest
from live_texts import text_of, texts

from core.config import EngineConfig
from core.errors import ConfigError
from workers.engine import TargetEngine
from workers.live import KeptText, LearningBuffer, files_after, read_kept
from workers.live import buffer as module


def test_what_is_kept_is_read_again(tmp_path):
    buffer = LearningBuffer(tmp_path / "new", 10_000, 7)
    kept = [text_of(5, accepted=3, rejected=2), text_of(9)]
    for text in kept:
        buffer.add(text)
    buffer.close()
    (file,) = files_after(tmp_path / "new")
    found = read_kept([file])
    assert [each.token_ids for each in found] == [each.token_ids for each in kept]
    assert [(each.first, each.missed, each.top_ids) for each in found] == [
        (each.first, each.missed, each.top_ids) for each in kept
    ]
    assert (found[0].num_accepted, found[0].num_rejected) == (3, 2)
    assert found[0].top_logprobs[0] == pytest.approx(kept[0].top_logprobs[0], abs=1e-4)
    assert buffer.num_kept == sum(each.num_chosen for each in kept) == 40


def test_only_its_owner_may_read_it(tmp_path):
    buffer = LearningBuffer(tmp_path / "new", 10_000, 7)
    buffer.add(text_of(5))
    buffer.close()
    (file,) = files_after(tmp_path / "new")
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0


def test_the_oldest_texts_are_deleted_when_it_is_full(tmp_path):
    buffers = [LearningBuffer(tmp_path, 10_000, epoch) for epoch in (1, 2)]
    sent = texts(900)  # 21,600 tokens
    for number, text in enumerate(sent):
        buffers[number % 2].add(text)
    for buffer in buffers:
        buffer.close()
    kept = read_kept(files_after(tmp_path))
    assert 8_000 < sum(len(text.token_ids) for text in kept) <= 10_000
    assert sent[-1].token_ids in [text.token_ids for text in kept]
    assert not list(tmp_path.glob("*.partial"))


def test_a_full_disk_is_told_of_once_and_loses_nothing_but_texts(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(module, "WRITE_PERIOD_S", 0.0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    buffer = LearningBuffer(tmp_path, 10_000, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        for text in texts(40):
            buffer.add(text)
        buffer.close()
    assert (buffer.num_kept, buffer.num_lost) == (0, 800)
    assert [record.message for record in caplog.records] == [
        f"nothing is kept to learn from in {tmp_path}: [Errno 28] No space left on device; serving goes on"
    ]
    again = LearningBuffer(tmp_path, 10_000, 1)
    again.add(text_of(5))
    again.close()
    assert again.num_kept == 20


def test_a_slow_disk_never_holds_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 4)
    monkeypatch.setattr(module, "WRITE_PERIOD_S", 0.0)
    door = threading.Event()
    write = LearningBuffer._write
    monkeypatch.setattr(LearningBuffer, "_write", lambda self, texts: door.wait() and write(self, texts))
    buffer = LearningBuffer(tmp_path, 10_000, 1)
    for text in texts(40):
        buffer.add(text)
    assert buffer.num_lost >= 30 * 20
    door.set()
    buffer.close()
    assert buffer.num_kept + buffer.num_lost == 40 * 20


def test_a_directory_that_cannot_be_made_is_refused_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"target\.engine\.learning_buffer: .*file/in cannot be written"):
        LearningBuffer(tmp_path / "file" / "in", 10_000, 1)


def test_a_directory_that_cannot_be_written_is_refused_before_anything_is_loaded():
    """Not even root may write to /proc."""
    with pytest.raises(ConfigError, match=r"^target\.engine\.learning_buffer: /proc cannot be written"):
        TargetEngine.load(EngineConfig("/nowhere", learning_buffer="/proc"), 1, lambda _: None)


def test_a_broken_file_and_one_that_is_gone_are_left_out(tmp_path, caplog):
    (tmp_path / "1-1.jsonl").write_text(text_of(5).line() + '{"token_ids": [1]}\n')
    assert [type(each) for each in read_kept([tmp_path / "1-1.jsonl", tmp_path / "2-1.jsonl"])] == [KeptText]
    assert "is no text to learn from" in caplog.text


def test_a_file_that_cannot_be_read_costs_its_texts_alone(tmp_path, caplog):
    (tmp_path / "1-1.jsonl").write_bytes(b"\xff")
    (tmp_path / "2-1.jsonl").mkdir()  # an OSError that is no FileNotFoundError
    (tmp_path / "3-1.jsonl").write_text(text_of(5).line())
    assert len(read_kept([tmp_path / f"{number}-1.jsonl" for number in (1, 2, 3)])) == 1
    assert "2-1.jsonl cannot be read" in caplog.text


def test_half_a_file_of_a_killed_writer_is_deleted_and_other_files_are_left(tmp_path):
    for name, age in (("old.partial", 3600), ("new.partial", 0), ("notes.jsonl", 3600)):
        (tmp_path / name).write_text("")
        then = time.time() - age
        os.utime(tmp_path / name, (then, then))
    LearningBuffer(tmp_path, 10_000, 1).close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new.partial", "notes.jsonl"]
    assert files_after(tmp_path) == []
