"""An encoder-decoder in this process: a source of its own, and a prompt that begins the decoder's text."""

from __future__ import annotations

import pytest

from core.errors import InvalidRequest
from outrider import LLM
from tests import checkpoints

pytestmark = pytest.mark.thorough

GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = checkpoints.write("bart", tmp_path_factory.mktemp("bart"), vocab_size=checkpoints.VOCAB_SIZE)
    settings = {"target.engine.kv_cache_tokens": 256, "target.engine.num_threads": 1}
    with LLM(path, progress=False, settings=settings) as llm:
        yield llm


def test_a_prompt_without_a_source_is_the_source(llm):
    alone, apart = llm.generate("ab", **GREEDY)[0], llm.generate("", source="ab", **GREEDY)[0]
    assert alone.prompt_token_ids == apart.prompt_token_ids
    assert alone.token_ids == apart.token_ids


def test_a_prompt_beside_a_source_begins_the_output(llm):
    whole = llm.generate("", source="ab", **GREEDY)[0]
    begun = llm.generate([whole.token_ids[:3]], source="ab", **GREEDY | {"max_tokens": 5})[0]
    assert begun.token_ids == whole.token_ids[3:]


def test_a_source_may_be_ids_and_is_searched(llm):
    ids = llm.generate("", source="ab", **GREEDY)[0].prompt_token_ids[:2]
    by_text, by_ids = (
        llm.generate("", source=each, beam_width=2, max_tokens=4)[0].token_ids for each in ("ab", tuple(ids))
    )
    assert by_text == by_ids
    with pytest.raises(InvalidRequest, match=r"^source: must be in"):
        llm.generate("", source=(10**6,), max_tokens=4)
