"""Two models in one application, chosen by `model`, which share the replicas of one draft."""

from __future__ import annotations

import pytest
from ray import serve
from served import MAX_TRIES

from deploy.app import APPLICATION
from deploy.launch import served
from deploy.settings import DEMO_DIRECTORY, DEMO_SETTINGS, parse_fleet
from outrider_client import Client, NotFound, Speculation

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = "def fibonacci(n):\n"
SPECULATION = {"policy": "static", "max_draft_tokens": 4, "guessers": ("draft",), "draft_timeout_s": 30.0}
FLEET = {
    "models": [
        {
            "model_name": "org/large",
            "target": DEMO_SETTINGS["target"],
            "shared_draft": "small",
            "speculation": SPECULATION,
        },
        {
            "model_name": "twin",  # the draft as a target: other tokens than the large one's
            "target": {"engine": {"model": str(DEMO_DIRECTORY / "draft"), "deterministic": True}},
            "shared_draft": "small",
            "speculation": SPECULATION,
        },
    ],
    "drafts": {"small": DEMO_SETTINGS["draft"]},
}


@pytest.fixture(scope="module")
def client():
    """A client of the models that `outrider serve --config FILE` starts."""
    with (
        served(parse_fleet(FLEET), lambda _: None) as endpoints,
        Client(f"localhost:{endpoints.grpc_port}") as client,
    ):
        yield client


def complete(client: Client, model: str, gamma: int | None = None) -> tuple[tuple[int, ...], Speculation | None]:
    completion = client.generate(
        PROMPT, model=model, max_tokens=48, ignore_eos=True, temperature=0.8, seed=3, max_draft_tokens=gamma
    )
    return completion.token_ids, completion.finish.speculation


def test_each_model_answers_to_its_name_and_the_first_to_none(client):
    large, twin = complete(client, "org/large")[0], complete(client, "twin")[0]
    assert large != twin
    assert complete(client, "")[0] == large
    assert {client.model_info(model=name).model for name in ("", "org/large", "twin")} == {"org/large", "twin"}
    assert [model.name for model in client.list_models()] == ["org/large", "twin"]
    for name in ("", "org/large", "twin"):
        assert client.detokenize(client.tokenize(PROMPT, model=name), model=name, skip_special_tokens=True) == PROMPT
    with pytest.raises(NotFound, match="there is no model 'other' here; this server has 'org/large', 'twin'"):
        complete(client, "other")


def test_both_are_drafted_for_by_the_same_replicas_and_neither_changes_a_token(client):
    assert set(serve.status().applications[APPLICATION].deployments) == {
        "orchestrator",
        "target-org-large",
        "target-twin",
        "draft-small",
    }
    for model in ("org/large", "twin"):
        plain, _ = complete(client, model, gamma=0)
        for _ in range(MAX_TRIES):
            tokens, stats = complete(client, model)
            assert tokens == plain
            if stats.accepted_tokens:
                break
        assert stats.accepted_tokens > 0
