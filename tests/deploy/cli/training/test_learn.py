"""`outrider learn`: one round from a buffer to a link, clear refusals, and a buffer that `train-head` reads."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest

from deploy.cli.main import main
from deploy.cli.training.training_texts import read_texts
from orchestrator.text import Tokenizer
from tests import checkpoints
from workers.live import KeptText, LearningBuffer, files_after

NUM_TEXTS, SIZE = 40, 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoints.write("llama", tmp_path_factory.mktemp("draft"))


@pytest.fixture
def folders(checkpoint, tmp_path):
    """A buffer with texts that say one token over and over, and a link to the draft."""
    buffer = LearningBuffer(tmp_path / "buffer", 10_000, 1)
    for number in range(NUM_TEXTS):
        missed = list(range(4, SIZE))
        tops = [[7]] * len(missed), [[-0.01]] * len(missed)
        buffer.add(KeptText([number, 1, 2, 3, *[7] * (SIZE - 4)], 4, missed, *tops, 2, 8))
    buffer.close()
    (tmp_path / "current").symlink_to(checkpoint)
    return tmp_path


def learn(folders, *more, **changed):
    given = {"buffer": "buffer", "draft": "current", "versions": "versions", **changed}
    words = [word for name, value in given.items() for word in (f"--{name}", str(folders / value))]
    return main(["learn", *words, *more])


def test_a_round_ends_with_another_draft_behind_the_link(folders, checkpoint, capsys):
    more = ("--every-tokens", "100", "--steps", "30", "--learning-rate", "0.01", "--judge-guesses", "1000000")
    with patch("deploy.cli.training.learn.time.sleep", wait), pytest.raises(WaitsError):
        learn(folders, *more)  # until it waits for the traffic of the new draft
    assert (folders / "current").resolve() == (folders / "versions" / "0001").resolve()
    assert "0001 is handed over; held out, " in capsys.readouterr().err
    (folders / "versions" / "judged.json").unlink()
    assert learn(folders, "--rounds", "1", *more, "--steps", "1", "--learning-rate", "1e-7") == 0
    assert "no new draft, the old one stays: the new one is not better" in capsys.readouterr().err


class WaitsError(Exception):
    pass


def wait(_):
    raise WaitsError


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"buffer": "nowhere"}, "--buffer: .*nowhere is not a directory: set target.engine.learning_buffer to it"),
        ({"draft": "buffer"}, "--draft: .*buffer must be a symbolic link to a checkpoint: ln -s CHECKPOINT"),
        ({"draft": "nowhere"}, "--draft: .*nowhere must be a symbolic link"),
        ({"versions": "current/config.json"}, "--versions: .*config.json cannot be written: "),
        ({"versions": "/proc"}, "--versions: /proc cannot be written: "),
    ],
)
def test_what_cannot_be_is_refused(folders, capsys, changed, problem):
    assert learn(folders, **changed) == 2
    said = capsys.readouterr().err
    assert re.search(problem, said), said


def test_a_link_that_cannot_be_switched_is_refused_before_a_draft_is_trained(folders, capsys):
    assert learn(folders, draft="/proc/self/cwd") == 2
    assert re.search("--draft: /proc/self cannot be written: ", capsys.readouterr().err)


def test_a_device_that_torch_does_not_know_is_refused_at_start(folders, capsys):
    assert learn(folders, "--device", "foo") == 2
    assert "--device: " in capsys.readouterr().err


def test_a_buffer_is_data_for_heads(folders, checkpoint):
    texts = read_texts(files_after(folders / "buffer"), Tokenizer.from_directory(checkpoint), 1000)
    assert len(texts) == NUM_TEXTS
    assert (texts[0].token_ids[:4], texts[0].spans, texts[0].kind) == ([0, 1, 2, 3], [(4, SIZE)], "live")
