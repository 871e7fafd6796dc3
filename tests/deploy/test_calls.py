"""A call is named by its caller's request id, if that is valid; log lines carry the name."""

from __future__ import annotations

import json
import logging

import pytest

from deploy import calls
from deploy.calls import CallId
from deploy.logs import JsonFormatter

TRACE_ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT}-01"


def test_a_call_is_named_by_its_caller():
    call = calls.begin([("x-request-id", "mine"), ("traceparent", TRACEPARENT), ("authorization", "Bearer x")])
    assert call == calls.current() == CallId("mine", TRACEPARENT)
    assert call.trace_id == TRACE_ID
    assert call.headers == (("x-request-id", "mine"), ("traceparent", TRACEPARENT))


@pytest.mark.parametrize("given", ["", "x" * 129, "a\nb", "한", b"mine"])
def test_what_no_header_can_carry_is_no_name(given):
    first, second = (calls.begin([("x-request-id", given)]).request_id for _ in range(2))
    assert len({given, first, second}) == 3


@pytest.mark.parametrize(
    "given",
    [
        f"ff-{TRACE_ID}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()}-{PARENT}-01",
        f"00-{TRACE_ID}-{PARENT}",
        f"00-{TRACE_ID}-{PARENT}-01-more",
        f"{TRACEPARENT}\n",
        "hello",
        "",
    ],
)
def test_what_is_no_traceparent_is_no_trace(given):
    assert calls.begin([("traceparent", given.removesuffix("\n") + "x" * given.endswith("\n"))]).traceparent == ""


def test_a_traceparent_of_a_later_version_may_say_more():
    assert calls.begin([("traceparent", f"01-{TRACE_ID}-{PARENT}-01-more")]).trace_id == TRACE_ID


def test_the_message_s_own_id_goes_before_and_keeps_the_trace():
    calls.begin([("x-request-id", "header"), ("traceparent", TRACEPARENT)])
    calls.rename("이름")
    assert calls.current() == CallId("이름", TRACEPARENT)
    assert calls.current().headers[0] == ("x-request-id", "%EC%9D%B4%EB%A6%84"), "metadata are ASCII"
    for unfit in ("", "x" * 129, "a\nb"):
        calls.rename(unfit)
    assert calls.current().request_id == "이름"


def test_a_json_line_says_whose_it_is_and_how_it_ended(caplog):
    calls.begin([("x-request-id", "mine"), ("traceparent", TRACEPARENT)])
    with caplog.at_level(logging.INFO, "deploy"), calls.answering("Generate") as answer:
        answer.status = "OK"
    line = json.loads(JsonFormatter().format(caplog.records[-1]))
    assert (line["request_id"], line["trace_id"], line["level"]) == ("mine", TRACE_ID, "INFO")
    assert (line["method"], line["status"], line["logger"]) == ("Generate", "OK", "deploy.calls")
    assert line["duration_s"] >= 0


def test_an_exception_stays_on_its_line():
    error = KeyError("x")
    record = logging.LogRecord("deploy", logging.ERROR, "", 0, "broken %s", (5,), (KeyError, error, None))
    (line,) = JsonFormatter().format(record).splitlines()
    assert json.loads(line)["message"] == "broken 5"
    assert "KeyError" in json.loads(line)["exception"]


def test_a_call_that_its_caller_leaves_is_cancelled_and_a_probe_is_not_worth_a_line(caplog):
    with caplog.at_level(logging.INFO, "deploy"):
        with pytest.raises(GeneratorExit), calls.answering("GenerateStream"):
            raise GeneratorExit
        with calls.answering("GET /health", is_probe=True):
            pass
    assert [record.getMessage().partition(" in ")[0] for record in caplog.records] == ["GenerateStream: CANCELLED"]
