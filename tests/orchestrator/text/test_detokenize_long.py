"""Ten thousand outputs of scripts whose characters are several tokens, in any blocks; stop strings at every cut."""

from __future__ import annotations

from random import Random

import pytest

from orchestrator.text.detokenize import IncrementalDetokenizer
from tests.orchestrator.text.test_detokenize import BYTES, PIECES, check_cut, shown

LETTERS = (
    *"漢字仮名交じり文。한국어조합繁體简体",
    *("👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "🇨🇭", "👍🏽", "☃\ufe0f", "🙂"),
    *("e\u0301", "a\u0308\u0323", "\u1112\u1161\u11ab", "क्षि", "ก็", "ﷺ", "\u202e", "\ud7ff", "\U0010ffff"),
    *"ab \n\t<>",
)
NUM_OUTPUTS = 10_000
NUM_STOPS = 1000


def text_of(random: Random, most: int) -> str:
    return "".join(random.choice(LETTERS) for _ in range(random.randint(1, most)))


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "byte-fallback"])
def test_any_blocks_of_any_script_give_what_the_whole_decodes_to(tokenizer):
    random = Random(20261125)
    for index in range(NUM_OUTPUTS // 2):
        ids = tokenizer.encode(text_of(random, 16))
        # Cut off inside a character, as max_tokens does. With byte fallback a broken character makes a decoder give up
        # the whole ones before it, too, which a stream has shown by then (test_detokenize.py).
        if index % 4 == 0 and tokenizer is BYTES:
            ids = ids[: random.randint(0, len(ids))]
        sizes = [random.randint(0, 9) for _ in range(30)]
        assert shown(tokenizer, ids, sizes) == tokenizer.decode(ids), (ids, sizes)


@pytest.mark.thorough
def test_a_stop_string_is_found_wherever_blocks_are_cut():
    random = Random(20261125)
    for _ in range(NUM_STOPS):
        text = text_of(random, 6)
        start = random.randint(0, len(text) - 1)
        stop = [text[start : start + random.randint(1, 4)]]
        ids = BYTES.encode(text)
        for cut in range(len(ids) + 1):
            check_cut(BYTES, ids, stop, [cut, len(ids)], include_stop=bool(cut % 2))


def test_what_is_held_back_at_the_end_is_given_at_the_end():
    detokenizer = IncrementalDetokenizer(BYTES, ["漢字仮"])
    pieces = [detokenizer.push([each]).text for each in BYTES.encode("ab漢字")]
    assert "".join(pieces) == "ab"
    assert detokenizer.finish().text == "漢字"
