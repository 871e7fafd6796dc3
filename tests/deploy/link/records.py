"""Strategies for whatever may travel over a link."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from core.ranges import ranges_of
from core.records import (
    Adapter,
    Base,
    Continuation,
    DraftRequest,
    DraftUpdate,
    Features,
    Grammar,
    GrammarKind,
    Missing,
    Refused,
    Sampling,
    SequenceSpec,
    Stamp,
    Timing,
    TokenLogprobs,
    Verdict,
    Verification,
    VerifyRequest,
    Want,
)
from core.speculation.growth import Measure, NewNodes, TreeSpec
from core.speculation.guesser import Guesses
from core.speculation.token_tree import ROOT, SparseDistribution, TokenTree

MAX_TOKEN = 2**31 - 1


def tuples(elements, max_size=6):
    return st.lists(elements, max_size=max_size).map(tuple)


token_ids = st.integers(0, MAX_TOKEN)
counts = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 2**32 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
shares = st.floats(0, 1)
stamps = st.builds(Stamp, st.text(), st.integers(0, 2**62 - 1), st.integers(0, 2**63))
bases = st.builds(Base, counts, st.integers(0, 2**61 - 2))
probabilities = st.floats(0, 1, width=32)
distributions = st.lists(st.tuples(token_ids, probabilities), max_size=5).map(
    lambda entries: SparseDistribution(tuple(i for i, _ in entries), tuple(p for _, p in entries))
)
timings = st.builds(Timing, finite, finite, counts, counts, counts, finite)
logprobs = st.builds(TokenLogprobs, finite | st.just(-math.inf), tuples(st.tuples(token_ids, finite)))


def numbers(allowed):
    """Any number of a range, its ends included."""
    low, high = allowed.low, allowed.high
    within = st.integers(low, high) if allowed.is_whole else st.floats(low, high, exclude_min=allowed.excludes_low)
    return within | st.just(high) | st.just(0 if allowed.zero else high)


samplings = st.builds(
    Sampling,
    **{name: numbers(allowed) for name, allowed in ranges_of(Sampling).items()},
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=4).map(
        lambda given: tuple(sorted(given.items()))
    ),
    suppressed_ids=tuples(token_ids),
    allowed_token_ids=tuples(token_ids),
    bad_words=tuples(st.lists(token_ids, min_size=1, max_size=3).map(tuple)),
)
specs = st.builds(
    SequenceSpec,
    prompt_len=counts,
    sampling=samplings,
    verification=st.sampled_from(Verification),
    num_logprobs=st.none() | st.integers(0, 20),
    num_prompt_logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), st.text()),
    adapter=st.none() | st.builds(Adapter, st.text(), st.text(), st.text()),
    lenience=st.floats(0.0, 1.0, exclude_min=True),
)


@st.composite
def trees(draw):
    num_nodes = draw(st.integers(0, 8))
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(num_nodes))
    tokens = tuple(draw(token_ids) for _ in range(num_nodes))
    q = tuple(draw(distributions) for _ in range(num_nodes)) if draw(st.booleans()) else ()
    return TokenTree(tokens, parents, q)


laws = st.lists(st.tuples(token_ids, st.floats(0.01, 1)), min_size=1, max_size=5).map(
    lambda entries: SparseDistribution(
        tuple(i for i, _ in entries), tuple(float(np.float32(p / sum(p for _, p in entries))) for _, p in entries)
    )
)
"""Laws that a token can have been drawn from."""
steadies = st.builds(
    TreeSpec,
    sizes,
    sizes,
    shares,
    st.tuples(finite, finite),
    tuples(st.floats(0, 0.2), max_size=5),
    st.booleans(),
    num_passes=counts,
    fanout=sizes,
    measure=st.sampled_from(Measure),
    min_confidence=shares,
)
singles = st.floats(0, 1, width=32)


@st.composite
def all_new_nodes(draw):
    first, num_nodes = draw(st.integers(0, 2**31 - 20)), draw(st.integers(0, 6))
    return NewNodes(
        first,
        tuple(draw(st.integers(ROOT, first + node - 1)) for node in range(num_nodes)),
        *(
            tuple(draw(column) for _ in range(num_nodes))
            for column in (token_ids, st.integers(0, 2**31 - 1), singles.filter(bool), singles)
        ),
        draw(st.integers(ROOT, first - 1)),
        tuple(draw(laws) for _ in range(num_nodes)) if draw(st.booleans()) else (),
    )


@st.composite
def features(draw):
    width, num_tokens = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    size = 2 * width * num_tokens
    return Features(draw(st.integers(0, 2**63)), width, draw(st.binary(min_size=size, max_size=size)))


@st.composite
def guesses(draw):
    """Without distributions, which do not travel with a verdict."""
    tree = draw(trees())
    return Guesses(tree.parents, tree.tokens, tuple(draw(shares) for _ in tree.tokens))


offers = st.builds(Continuation, stamps, st.integers(0, 2**63), trees(), st.booleans())
verify_requests = st.builds(
    VerifyRequest,
    stamps,
    bases,
    tuples(token_ids),
    block=trees(),
    spec=st.none() | specs,
    wants=st.just(()) | st.just(tuple(Want)),
)
draft_requests = st.builds(
    DraftRequest,
    stamps,
    bases,
    tuples(token_ids),
    growth=steadies,
    spec=st.none() | specs,
    features=st.none() | features(),
)
replies = st.one_of(
    st.builds(
        Verdict,
        stamps,
        tuples(counts),
        token_ids,
        counts,
        logprobs=tuples(logprobs),
        timing=st.none() | timings,
        continued=st.integers(0, 2**63),
        num_relaxed=counts,
        samples=tuples(token_ids),
        num_cached=st.integers(0, 2**31),
        features=st.none() | features(),
        guesses=guesses(),
    ),
    st.builds(DraftUpdate, stamps, all_new_nodes(), counts, st.none() | timings, st.booleans()),
    st.builds(Missing, stamps, counts),
    st.builds(Refused, stamps, st.text(), st.booleans(), st.none() | st.text()),
)
