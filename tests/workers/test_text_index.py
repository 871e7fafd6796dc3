"""Lookups in a text, which may be shortened meanwhile."""

from __future__ import annotations

from random import Random

from workers.text_index import TextIndex


def found(text, path, num):
    """The same by looking through all of it."""
    ending = (*text[-3:], *path)[-3:]
    for end in range(len(text) - 1, 2, -1):
        if tuple(text[end - 3 : end]) == ending:
            whole = [*text, *path]
            for place in range(end, end + num):
                whole.append(whole[place])
            return whole[end : end + num]
    return []


def test_it_finds_what_followed_last():
    index, text = TextIndex(), [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2]
    index.update(text)
    assert index.lookup(text, [3], 3) == [6, 7, 1]
    assert index.lookup(text, [9], 3) == [], "never seen"


def test_an_ending_that_nothing_followed_yet_is_not_found():
    index, text = TextIndex(), [1, 2, 3]
    index.update(text)
    assert index.lookup(text, [], 3) == []


def test_a_loop_goes_on_through_the_path():
    index, text = TextIndex(), [7, 7, 7, 7]
    index.update(text)
    assert index.lookup(text, [7, 7], 3) == [7, 7, 7]


def test_growing_text_is_found_like_the_whole_of_it():
    random = Random(1)
    index, text = TextIndex(), list[int]()
    for _ in range(300):
        text += [random.randrange(3) for _ in range(random.randrange(4))]
        index.update(text)
        path = [random.randrange(3) for _ in range(random.randrange(3))]
        assert index.lookup(text, path, 4) == found(text, path, 4)


def test_a_text_that_was_shortened_is_never_misquoted():
    random = Random(2)
    index, text = TextIndex(), list[int]()
    for _ in range(300):
        del text[random.randrange(len(text) + 1) :]
        text += [random.randrange(3) for _ in range(random.randrange(9))]
        index.update(text)
        after = index.lookup(text, [], 1)
        ending = text[-3:]
        quotes = [text[end : end + 1] for end in range(3, len(text)) if text[end - 3 : end] == ending]
        assert after == [] or after in quotes
