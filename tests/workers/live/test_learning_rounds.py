"""A better draft is handed over, one that is worse in service is taken back, and what fails changes nothing."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
import torch
from live_texts import texts
from safetensors import SafetensorError

from core.errors import ConfigError
from tests.checkpoints import write
from workers.live import Learner, LearningBuffer, LearningPlan, LearningRounds, RoundTerms, Versions
from workers.live.rounds import _split

PLAN = LearningPlan(num_steps=20, batch=4, learning_rate=1e-2)
TERMS = RoundTerms(every_tokens=1000, judge_guesses=200, tolerance=0.02, settle_s=30.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write("llama", tmp_path_factory.mktemp("draft"))


@pytest.fixture
def link(checkpoint, tmp_path):
    path = tmp_path / "current"
    path.symlink_to(checkpoint)
    return path


class Traffic:
    """Texts that a target keeps, with this acceptance of 0 to 10 in ten guesses."""

    def __init__(self, directory):
        self.directory = directory
        directory.mkdir()

    def add(self, accepted, number=64, seed=0, num_guesses=10):
        buffer = LearningBuffer(self.directory, 100_000, 1)
        for text in texts(number, seed=seed, accepted=accepted, rejected=num_guesses - accepted):
            buffer.add(text)
        buffer.close()


@pytest.fixture
def traffic(tmp_path):
    return Traffic(tmp_path / "buffer")


@pytest.fixture
def rounds(traffic, link, tmp_path):
    torch.manual_seed(0)
    return LearningRounds(traffic.directory, Versions(link, tmp_path / "versions"), PLAN, TERMS)


def test_a_round_waits_for_enough_tokens(rounds, traffic, link, checkpoint):
    traffic.add(5, number=8)
    assert rounds.tick(0.0) is None
    assert link.resolve() == checkpoint.resolve()


def test_a_better_draft_is_handed_over_and_stays(rounds, traffic, link, tmp_path):
    traffic.add(5)
    said = rounds.tick(0.0)
    assert "0001 is handed over; held out, " in said
    assert link.resolve() == (tmp_path / "versions" / "0001").resolve()
    traffic.add(0, seed=1)
    assert rounds.tick(29.0) is None, "streams that the old draft served do not count"
    assert rounds.tick(30.0) is None
    traffic.add(6, seed=2)
    assert rounds.tick(31.0).endswith("0001 stays: acceptance 0.500 -> 0.600")
    assert rounds.num_rounds == 1


def test_a_draft_that_is_worse_in_service_is_taken_back(rounds, traffic, link, checkpoint, tmp_path):
    traffic.add(5)
    rounds.tick(0.0)
    rounds.tick(30.0)
    traffic.add(4, seed=2)
    said = rounds.tick(31.0)
    assert "0001 is taken back" in said
    assert said.endswith("acceptance 0.500 -> 0.400")
    assert link.resolve() == checkpoint.resolve()
    assert rounds.num_rounds == 1
    versions = Versions(link, tmp_path / "versions")
    assert (tmp_path / "versions" / "0001").exists(), "replicas may be loading it"
    assert versions.add(lambda folder: folder.mkdir()).name == "0002"


def test_the_first_draft_is_compared_with_what_guesses_there_were_before(rounds, traffic):
    rounds._terms = replace(TERMS, judge_guesses=1000)
    traffic.add(5)  # 640 guesses
    rounds.tick(0.0)
    rounds.tick(30.0)
    traffic.add(4, number=50, seed=2)
    assert rounds.tick(31.0) is None, "a draft is not judged by 500 guesses"
    traffic.add(4, number=51, seed=3)
    assert rounds.tick(32.0).endswith("acceptance 0.500 -> 0.400")


def test_a_draft_that_is_asked_for_nothing_any_more_is_taken_back(rounds, traffic, link, checkpoint):
    rounds._terms = replace(TERMS, judge_guesses=40)
    traffic.add(5)
    rounds.tick(0.0)
    rounds.tick(30.0)
    traffic.add(0, number=30, seed=2, num_guesses=0)  # 600 tokens
    assert rounds.tick(31.0) is None
    traffic.add(0, number=30, seed=3, num_guesses=0)
    assert rounds.tick(32.0).endswith("acceptance 0.500 -> 0.000")
    assert link.resolve() == checkpoint.resolve()


def test_a_loss_that_is_no_number_leaves_the_old_draft(rounds, traffic, link, checkpoint, tmp_path):
    rounds._plan = replace(PLAN, learning_rate=1e30)
    traffic.add(5)
    assert rounds.tick(0.0).startswith("no new draft, the old one stays: step ")
    assert link.resolve() == checkpoint.resolve()
    assert list((tmp_path / "versions").iterdir()) == []
    assert rounds.tick(1.0) is None, "it waits for other texts"


def test_a_draft_that_is_not_better_is_not_handed_over(rounds, traffic, link, checkpoint, tmp_path):
    rounds._plan = replace(PLAN, learning_rate=1e-7, num_steps=1)
    traffic.add(5)
    assert rounds.tick(0.0).startswith("no new draft, the old one stays: the new one is not better; held out, ")
    assert link.resolve() == checkpoint.resolve()
    assert list((tmp_path / "versions").iterdir()) == []


def test_a_draft_that_forgets_earlier_texts_is_not_handed_over(rounds, traffic, link, monkeypatch):
    traffic.add(5)
    rounds.tick(0.0)
    rounds.tick(30.0)
    traffic.add(6, seed=2)
    rounds.tick(31.0)
    served = link.resolve()
    shares = iter([0.5, 0.6, 0.5, 0.4])  # old and new, on held-out and on earlier texts
    losses = iter([0.5, 0.4, 0.5, 0.5])
    measured = rounds._compare.__globals__["agreement"]
    monkeypatch.setitem(
        rounds._compare.__globals__,
        "agreement",
        lambda *each: replace(measured(*each), share=next(shares), loss=next(losses)),
    )
    traffic.add(6, seed=3)
    assert "the new one forgets: earlier texts" in rounds.tick(40.0)
    assert link.resolve() == served


def test_a_full_disk_leaves_the_old_draft(rounds, traffic, link, checkpoint, tmp_path, monkeypatch):
    def full(_, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Learner, "write", full)
    traffic.add(5)
    assert "No space left on device" in rounds.tick(0.0)
    assert link.resolve() == checkpoint.resolve()
    assert list((tmp_path / "versions").iterdir()) == []


def test_what_a_dead_trainer_left_half_written_is_no_version(link, checkpoint, tmp_path):
    versions = Versions(link, tmp_path / "versions")
    (tmp_path / "versions" / "0001.partial").mkdir()
    (tmp_path / "versions" / "0001.partial" / "half").write_text("")
    made = versions.add(lambda folder: folder.mkdir())
    assert (made.name, list(made.iterdir())) == ("0001", [])
    assert link.resolve() == checkpoint.resolve()


def test_old_versions_are_deleted_and_the_served_one_is_not(checkpoint, link, tmp_path):
    versions = Versions(link, tmp_path / "versions")
    made = [versions.add(lambda folder: folder.mkdir()) for _ in range(6)]
    versions.serve(made[0])
    versions.drop_old()
    assert sorted(each.name for each in (tmp_path / "versions").iterdir()) == ["0001", "0004", "0005", "0006"]
    assert versions.add(lambda folder: folder.mkdir()).name == "0007"


def test_a_draft_that_no_link_names_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"--draft: .* must be a symbolic link to a checkpoint: ln -s"):
        Versions(checkpoint, tmp_path / "versions")


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_new_process_takes_a_bad_draft_back(rounds, traffic, link, checkpoint, tmp_path, is_settled):
    traffic.add(5)
    rounds.tick(0.0)
    if is_settled:
        rounds.tick(30.0)
    new = LearningRounds(traffic.directory, Versions(link, tmp_path / "versions"), PLAN, TERMS)
    if not is_settled:
        assert new.tick(5.0) is None
        assert new.tick(35.0) is None
    traffic.add(4, seed=2)
    assert "0001 is taken back" in new.tick(36.0)
    assert link.resolve() == checkpoint.resolve()
    assert not (tmp_path / "versions" / "judged.json").exists()


def test_a_link_that_an_operator_switched_is_left(rounds, traffic, link, tmp_path):
    traffic.add(5)
    rounds.tick(0.0)
    (tmp_path / "other").mkdir()
    link.unlink()
    link.symlink_to(tmp_path / "other")
    assert "the link was switched meanwhile" in rounds.tick(31.0)
    assert link.resolve() == (tmp_path / "other").resolve()


def test_a_disk_that_is_full_for_weights_leaves_nothing(rounds, traffic, tmp_path, monkeypatch):
    def full(_, folder):
        folder.mkdir()
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(Learner, "write", full)
    traffic.add(5)
    assert "No space left on device" in rounds.tick(0.0)
    assert list((tmp_path / "versions").iterdir()) == []


def test_ids_without_a_row_of_the_draft_are_left_out(checkpoint):
    text = texts(1)[0]
    odd = replace(text, top_ids=[[10**6, 1, 2], *text.top_ids[1:]])
    (found,) = Learner(checkpoint).known([odd, replace(text, token_ids=[10**6, *text.token_ids[1:]])])
    assert found.missed == text.missed[1:]


def test_a_boosted_draft_must_be_better_where_the_others_miss(rounds, traffic, link, checkpoint):
    rounds._earlier = [checkpoint]
    rounds._plan = replace(PLAN, learning_rate=1e-7, num_steps=1)
    traffic.add(5)
    assert "not better where the others miss" in rounds.tick(0.0)
    assert link.resolve() == checkpoint.resolve()


def test_samples_of_one_prompt_are_on_one_side():
    given = [replace(text, token_ids=[*text.token_ids[:4], number]) for number in range(9) for text in texts(40)]
    held_out, taught = _split(given)
    prompts = [{tuple(text.token_ids[:4]) for text in side} for side in (held_out, taught)]
    assert prompts[0]
    assert not prompts[0] & prompts[1]


def test_earlier_texts_are_those_that_are_not_held_out_now(rounds, checkpoint, monkeypatch):
    measured = []
    found = rounds._compare.__globals__["agreement"]
    monkeypatch.setitem(
        rounds._compare.__globals__, "agreement", lambda model, of: measured.append(list(of)) or found(model, of)
    )
    first, second = texts(3, seed=5), texts(3, seed=6)
    rounds._compare(checkpoint, checkpoint, first)
    rounds._compare(checkpoint, checkpoint, [first[0], *second])
    assert first[0] not in measured[-1]
    assert len(measured[-1]) == 2
