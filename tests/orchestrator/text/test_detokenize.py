from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.text.detokenize import IncrementalDetokenizer
from orchestrator.text.tokenizer import Tokenizer
from tests.vocabularies import as_product, byte_fallback, byte_level

BYTES = as_product(byte_level())
PIECES = as_product(byte_fallback())
TEXTS = st.text(st.sampled_from("ab 안녕하세요é🙂👩‍💻\n—"), max_size=40)
SPLITS = st.lists(st.integers(0, 5), max_size=60)


def pushes(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """`ids` in blocks of these sizes, and the rest one by one."""
    cuts = [0, *(cut for cut in accumulate(sizes) if cut < len(ids))]
    return [ids[start:end] for start, end in pairwise([*cuts, *range(cuts[-1] + 1, len(ids) + 1)])]


def shown(tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int] = ()) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return "".join(detokenizer.push(block).text for block in pushes(ids, sizes)) + detokenizer.finish().text


def byte_ids(data: bytes) -> list[int]:
    """One token for each byte."""
    ids = {bytes(BYTES.token_bytes(token_id)): token_id for token_id in reversed(range(2, BYTES.vocab_size))}
    return [ids[bytes([byte])] for byte in data]


@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=60), SPLITS)
def test_any_ids_of_a_byte_level_vocabulary_give_what_they_decode_to(ids, sizes):
    assert shown(BYTES, ids, sizes) == BYTES.decode(ids)


@given(st.binary(max_size=30), SPLITS)
def test_any_bytes_valid_or_not_give_what_they_decode_to(data, sizes):
    ids = byte_ids(data)
    assert shown(BYTES, ids, sizes) == BYTES.decode(ids) == data.decode(errors="replace")


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "byte-fallback"])
@given(text=TEXTS, sizes=SPLITS)
def test_any_text_comes_back(tokenizer, text, sizes):
    ids = tokenizer.encode(text)
    assert shown(tokenizer, ids, sizes) == tokenizer.decode(ids) == text


@given(st.lists(st.integers(0, PIECES.vocab_size - 1).filter(lambda i: not 3 <= i < 259), max_size=30), SPLITS)
def test_pieces_without_bytes_give_what_they_decode_to(ids, sizes):
    assert shown(PIECES, ids, sizes) == PIECES.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "byte-fallback"])
def test_a_character_is_shown_as_soon_as_it_is_complete_and_not_before(tokenizer):
    ids = tokenizer.encode("a🙂b", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]).text for token_id in ids]
    assert [piece for piece in pieces if piece] == ["a", "🙂", "b"]
    assert pieces[-1] == "b"
    assert detokenizer.finish().text == ""


def test_an_output_that_ends_inside_a_character_ends_in_one_replacement_character():
    assert shown(BYTES, byte_ids("안".encode()[:2])) == "\ufffd"


def test_special_tokens_have_no_text_even_inside_a_character():
    first, second, third = byte_ids("안".encode())
    assert shown(BYTES, [0, first, 1, second, 0, third, 1]) == "안"
    assert shown(BYTES, [0, 1, 0]) == ""


def test_byte_fallback_keeps_what_it_has_shown_when_an_invalid_byte_follows():
    ids = [3 + byte for byte in "é".encode() + b"\xff"]
    assert shown(PIECES, ids) == "é\ufffd"


def test_invalid_bytes_are_not_held_back_for_ever():
    detokenizer = IncrementalDetokenizer(PIECES)
    assert detokenizer.push([3 + 0xFF] * 8).text == PIECES.decode([3 + 0xFF] * 8)


class Counting:
    """A tokenizer that counts how many ids it has been asked to turn into text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.is_byte_level = tokenizer.is_byte_level
        self.is_special = tokenizer.is_special
        self.num_ids = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.num_ids += 1
        return self._tokenizer.token_bytes(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        self.num_ids += len(ids)
        return self._tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("text", ["안녕하세요 ab " * 50, "🙂" * 300], ids=["words", "emoji"])
def test_the_cost_of_a_token_does_not_grow_with_the_output(tokenizer, text):
    ids, counting = tokenizer.encode(text), Counting(tokenizer)
    detokenizer = IncrementalDetokenizer(counting)
    for token_id in ids:
        detokenizer.push([token_id])
    assert counting.num_ids <= 16 * len(ids)


# Stop strings


class Chunks:
    """A vocabulary of arbitrary strings: a token may hold a whole stop string, or several, and what is around them."""

    is_byte_level = True

    def __init__(self, chunks: Sequence[str]) -> None:
        self._chunks = chunks

    def is_special(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes:
        return self._chunks[token_id].encode()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._chunks[token_id] for token_id in ids)


STOPS = st.lists(st.text(st.sampled_from("ab 안🙂"), min_size=1, max_size=4), max_size=3)


@given(TEXTS, STOPS, SPLITS, st.booleans())
@settings(max_examples=3 * settings.default.max_examples)
def test_a_stop_string_cuts_text_and_tokens_where_a_search_from_the_start_would(text, stop, sizes, include_stop):
    check_cut(BYTES, BYTES.encode(text), stop, sizes, include_stop)


@given(st.lists(st.text(st.sampled_from("ab 안"), max_size=8), max_size=6), STOPS, SPLITS, st.booleans())
@settings(max_examples=3 * settings.default.max_examples)
def test_so_it_does_where_stop_strings_begin_and_end_inside_tokens(chunks, stop, sizes, include_stop):
    check_cut(Chunks(chunks), range(len(chunks)), stop, sizes, include_stop)


def check_cut(tokenizer, ids, stop, sizes, include_stop):
    expected = cut_by_search(tokenizer, ids, stop, include_stop)
    detokenizer = IncrementalDetokenizer(tokenizer, stop, include_stop)
    found, num_kept, matched = "", 0, None
    for block in pushes(ids, sizes):
        piece = detokenizer.push(block)
        found, num_kept, matched = found + piece.text, num_kept + piece.num_kept, piece.stop
        if matched:
            break
    else:
        found += detokenizer.finish().text
    assert (found, num_kept, matched) == expected


def cut_by_search(tokenizer, ids, stop, include_stop):
    """Text, tokens kept, and the stop string that ended it, found by decoding everything again for every token."""
    for num_kept in range(len(ids) + 1):
        text = tokenizer.decode(ids[:num_kept])
        ends = {(text.find(s) + len(s), -len(s)): s for s in stop if s in text}
        if ends:
            end, matched = min(ends)[0], ends[min(ends)]
            return text[: end if include_stop else end - len(matched)], num_kept, matched
    return tokenizer.decode(ids), len(ids), None


@given(TEXTS, st.lists(st.text(st.sampled_from("ab 안🙂"), min_size=1, max_size=6), max_size=3), SPLITS)
def test_what_is_shown_depends_on_the_tokens_and_not_on_how_they_come(text, stop, sizes):
    ids = BYTES.encode(text)
    blocks, singly = IncrementalDetokenizer(BYTES, stop), IncrementalDetokenizer(BYTES, stop)
    for block in pushes(ids, sizes):
        piece, singles = blocks.push(block), []
        for token_id in block:
            singles.append(singly.push([token_id]))
            if singles[-1].stop:
                break
        assert piece.text == "".join(single.text for single in singles)
        assert piece.num_kept == sum(single.num_kept for single in singles)
        if piece.stop:
            break


def test_only_what_may_begin_a_stop_string_is_held_back():
    detokenizer = IncrementalDetokenizer(BYTES, ["\n\nclass"])
    assert detokenizer.push(byte_ids(b"x = 1\n")).text == "x = 1"
    assert detokenizer.push(byte_ids(b"y")).text == "\ny"
    assert detokenizer.push(byte_ids(b"\n\ncla")).text == ""
    assert detokenizer.finish().text == "\n\ncla"


def test_a_stop_string_may_lie_across_pushes_and_ends_inside_a_block():
    detokenizer = IncrementalDetokenizer(BYTES, ["end"])
    assert detokenizer.push(byte_ids(b"the e")).text == "the "
    piece = detokenizer.push(byte_ids(b"nd of it"))
    assert (piece.text, piece.num_kept, piece.stop) == ("", 2, "end")


def test_of_stop_strings_that_end_together_the_longest_wins():
    piece = IncrementalDetokenizer(BYTES, ["b", "ab"]).push(byte_ids(b"xab"))
    assert (piece.text, piece.stop) == ("x", "ab")


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        (("bcd",), "a", "bcd"),
        (("ef", "bc"), "a", "bc"),
        (("abcd", "bc"), "a", "bc"),  # begins later, and is complete first
        (("cd", "bcd", "d"), "a", "bcd"),  # complete together
        (("f", "abcdef"), "", "abcdef"),
    ],
)
@pytest.mark.parametrize("include_stop", [False, True])
def test_of_stop_strings_inside_one_token_the_first_that_is_complete_wins(stop, text, matched, include_stop):
    piece = IncrementalDetokenizer(Chunks(["abcdef", "g"]), stop, include_stop).push([0, 1])
    assert (piece.text, piece.num_kept, piece.stop) == (text + matched * include_stop, 1, matched)
