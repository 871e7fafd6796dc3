"""The block of a beam search: its beams, and guesses below them, as branches of one tree."""

from __future__ import annotations

from collections.abc import Sequence

from core.speculation import ROOT, TokenTree


def beam_tree(texts: Sequence[tuple[int, ...]], shared: int) -> tuple[dict[tuple[int, ...], int], TokenTree]:
    """The texts as branches of one tree below their first `shared` tokens; and the node of each that is as long as the
    first one or longer. No shorter ones: each is a copy of its tokens, and a search may have thousands."""
    size = len(texts[0])
    nodes = {texts[0]: ROOT} if shared == size else {}
    children: dict[tuple[int, int], int] = {}
    for text in texts:
        node = ROOT
        for end in range(shared + 1, len(text) + 1):
            node = children.setdefault((node, text[end - 1]), len(children))
            if end >= size:
                nodes[text[:end]] = node
    return nodes, TokenTree(tuple(token for _, token in children), tuple(parent for parent, _ in children))
