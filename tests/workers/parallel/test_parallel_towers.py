"""Two ranks of a text tower write what the whole multimodal model writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.model.test_contained import greedy, greedy_by_transformers, write
from tests.workers.parallel.ranks import Followers

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "gemma3", "mistral3", "llama4"])
def test_two_ranks_write_the_tokens_of_the_whole_model(followers: Followers, kind: str, tmp_path: Path) -> None:
    model = write(kind, tmp_path)
    with followers.runtime(tmp_path) as shared:
        assert greedy(shared, 12) == greedy_by_transformers(model, 12)
