"""Followers get the commands of rank 0, and a heartbeat tells a death from a goodbye."""

from __future__ import annotations

import queue
import random
import socket
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import WorkerLost
from workers.parallel.commands import KVEdit, pack_step, unpack_step
from workers.parallel.group import UNBOUNDED, RankGroup
from workers.parallel.heartbeat import Heartbeat, HeartbeatListener, connect
from workers.parallel.leader import LeaderCache
from workers.step.kv_cache import KVCache, LayerShape, OutOfBlocks, SequenceKV
from workers.step.readers import Span
from workers.step.rows import Step

NUMBERS = st.lists(st.integers(-1, 2**31 - 1), max_size=6)
SPANS = st.builds(
    lambda kv, numbers, parents: (kv, numbers, tuple(parents)),
    st.builds(SequenceKV, NUMBERS, st.integers(0, 99)),
    st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 9)),
    NUMBERS,
)
COMMANDS = st.tuples(
    st.lists(st.builds(KVEdit, NUMBERS, NUMBERS), max_size=3),
    st.builds(
        Step,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        st.lists(SPANS.map(lambda s: Span(s[0], s[1][0], s[1][1], s[2], s[1][2])), max_size=3),
    ),
)


def visible(edits, step):
    """The relevant parts of a command; sequences are compared by what they hold."""
    spans = [
        (s.first_row, s.num_chain, s.num_cached_nodes, s.kv.num_tokens, [*s.parents], s.kv.blocks) for s in step.spans
    ]
    edits = [([*edit.sources], [*edit.targets]) for edit in edits]
    return edits, step.ids, step.positions, step.wanted, spans


@given(COMMANDS)
def test_a_command_is_unpacked_as_it_was_packed(command):
    assert visible(*unpack_step(pack_step(*command))) == visible(*command)


@pytest.mark.parametrize("seed", range(5))
def test_who_carries_out_the_edits_has_the_same_kv(seed):
    """Whatever is reserved, compacted, rolled back and freed, and whatever had been in those blocks."""
    rng, shape = random.Random(seed), ([LayerShape(1, 2, 3)] * 2, 12, 4, torch.float32, torch.device("cpu"))
    leading, following = LeaderCache(*shape), KVCache(*shape)
    held = [leading.new_sequence() for _ in range(4)]
    for _ in range(60):
        kv = rng.choice(held)
        change_something(rng, leading, kv)
        edits, leading.edits = leading.edits, []
        for edit in edits:
            edit.apply(following)
        for ours, theirs in zip(leading.keys + leading.values, following.keys + following.values, strict=True):
            assert torch.equal(ours, theirs)
            slots = [leading.slot(kv, row) for row in range(kv.num_tokens)]
            ours[slots] = theirs[slots] = rng.random()  # a step is run


def change_something(rng, cache, kv):
    try:
        cache.reserve(kv, kv.num_tokens + rng.randrange(9))
    except OutOfBlocks:
        cache.truncate(kv, rng.randrange(kv.num_tokens + 1))
        return
    cache.extend(kv, len(kv.blocks) * cache.block_tokens - kv.num_tokens)
    base = rng.randrange(kv.num_tokens + 1)
    offsets = range(kv.num_tokens - base)
    cache.compact(kv, base, sorted(rng.sample(offsets, rng.randrange(len(offsets) + 1))))


class LateWork:
    """A collective that is complete the moment after a wait for it has timed out."""

    def __init__(self, *, is_failure):
        self.is_failure = is_failure
        self.num_waits = 0

    def is_completed(self):
        return self.num_waits > 0

    def wait(self, timeout=None):
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.is_failure:
            raise RuntimeError("Connection reset by peer")


def test_a_collective_that_is_complete_just_after_a_look_is_no_loss():
    group = object.__new__(RankGroup)
    group._heartbeat = SimpleNamespace(lost=None)
    work = LateWork(is_failure=False)
    group._wait(lambda: work, UNBOUNDED)
    assert work.num_waits == 2
    with pytest.raises(WorkerLost, match="Connection reset"):
        group._wait(lambda: LateWork(is_failure=True), UNBOUNDED)


@pytest.fixture
def heartbeats():
    """Rank 0's end, those of two followers, and what each was told."""
    listener = HeartbeatListener("127.0.0.1")
    found = queue.SimpleQueue()
    answering = threading.Thread(target=lambda: found.put(listener.accept_followers(3, 60.0)))
    answering.start()
    stranger = socket.create_connection(("127.0.0.1", listener.port))
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: nobody here\r\n\r\n")
    ends = [connect("127.0.0.1", listener.port, listener.token, rank, 60.0) for rank in (1, 2)]
    answering.join()
    stranger.close()
    told = [queue.SimpleQueue() for _ in range(3)]
    ends = [Heartbeat(peers, heard.put) for peers, heard in zip([found.get(), *ends], told, strict=True)]
    yield ends, told
    for line in ends:
        line.close(goodbye=False)


def test_who_leaves_without_a_word_is_lost_to_all(heartbeats):
    ends, told = heartbeats
    ends[2].close(goodbye=False)
    assert told[0].get(timeout=30) == "rank 2 is gone"
    assert told[1].get(timeout=30) == "rank 0 is gone", "it has given up the group"
    assert [line.lost for line in ends] == ["rank 2 is gone", "rank 0 is gone", None]


def test_who_says_goodbye_is_not_lost(heartbeats):
    ends, told = heartbeats
    for line in ends:
        line.close(goodbye=True)
    assert [heard.empty() for heard in told] == [True] * 3
    assert [line.lost for line in ends] == [None] * 3


def test_a_follower_that_does_not_come_is_not_waited_for(heartbeats):
    listener = HeartbeatListener("127.0.0.1")
    connection = connect("127.0.0.1", listener.port, "f" * 32, 1, 5.0)  # a token of another group
    with pytest.raises(TimeoutError):
        listener.accept_followers(2, 0.5)
    for end in connection:
        end.close()
