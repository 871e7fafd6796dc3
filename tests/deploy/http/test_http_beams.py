"""The outputs of a beam search, which one stream of the orchestrator brings, as choices of OpenAI's API."""

from __future__ import annotations

from dataclasses import replace

from test_http_servicer import call, events, servicer, whole

from core.records import Call, CallTrace
from tests.deploy.grpc.rpc import Script, greeting

_, LAST = greeting()
BEST = replace(LAST, text="best", score=-0.25)
SECOND = replace(LAST, text="second", stats=None, score=-0.5, output=1)
ASKED = {"use_beam_search": True, "n": 2, "best_of": 4}


async def test_a_search_is_one_stream_with_a_choice_for_each_output():
    script = Script(BEST, SECOND)
    status, body = await whole(servicer(script), call(**ASKED))
    assert status == 200
    assert [(each["index"], each["text"], each["outrider"]["score"]) for each in body["choices"]] == [
        (0, "best", -0.25),
        (1, "second", -0.5),
    ]
    (request,) = script.requests
    assert (request.beams.width, request.beams.num_outputs) == (4, 2)


async def test_it_streams_one_piece_for_each_output_of_each_prompt():
    script = Script(BEST, SECOND)
    pieces = await events(servicer(script), call(**ASKED, prompt=["a", "b"], stream=True))
    texts = {each["index"]: each["text"] for piece in pieces for each in piece["choices"] if each["text"]}
    assert texts == {0: "best", 1: "second", 2: "best", 3: "second"}
    assert len(script.requests) == 2


async def test_a_traced_search_has_its_calls_with_the_best_output_and_no_guessed_tokens():
    call_trace = CallTrace(Call.VERIFY, 0.25, 0.5, 3, 2)
    best = replace(BEST, token_ids=(5, 6), is_guess=(False,) * 2, trace=(call_trace,))
    script = Script(best, replace(SECOND, token_ids=(5, 7), is_guess=(False,) * 2, trace=()))
    _, body = await whole(servicer(script), call(**ASKED, speculation={"trace": True}))
    first, second = (each["outrider"] for each in body["choices"])
    assert [(each["call"], each["guesses"], each["used"]) for each in first["trace"]] == [("verify", 3, 2)]
    assert second["trace"] == []
    assert [(each["id"], each["source"]) for each in first["tokens"]] == [(5, "target"), (6, "target")]
    assert [each["id"] for each in second["tokens"]] == [5, 7]
