"""Checks the fields of a beam search, and those that a beam search cannot have."""

from __future__ import annotations

from dataclasses import replace

from core.errors import InvalidRequest
from core.ranges import ranges_of
from core.records import BeamSearch, GenerationRequest
from deploy.api.checks import require, within
from deploy.api.given import Given, GivenBeams
from deploy.api.hosted import Served

WIDTH = "beams.beam_width"


def with_beams(request: GenerationRequest, given: Given, served: Served) -> GenerationRequest:
    """The request with its beam search, if it asks for one. Raises: InvalidRequest."""
    if given.beams is None:
        return request
    search = _search(given.beams, 1 if given.n is None else given.n)
    if served.target.num_states:
        raise InvalidRequest("beams", f"must not be given: {served.name} has recurrent layers, which keep no branches")
    refused = {
        "sampling.temperature": ("0 or unset", given.sampling.get("temperature") or None),
        "stopping.stop": ("empty", request.stop),
        "resume_token_ids": ("empty", request.resume_tokens),
        "resume_samples": ("empty", given.resume_samples),
        "prompt_logprobs": ("unset", given.prompt_logprobs is not None),
        "speculation.trace": ("false", request.wants_trace),
        "receipt": ("false", request.wants_receipt),
    }
    for field, (allowed, is_given) in refused.items():
        if is_given:
            raise InvalidRequest(field, f"must be {allowed} beside beams")
    return replace(request, beams=search, sampling=replace(request.sampling, temperature=0.0))


def _search(given: GivenBeams, num_outputs: int) -> BeamSearch:
    ranges = ranges_of(BeamSearch)
    width = within(given.beam_width, ranges["width"], WIDTH)
    penalty = within(given.length_penalty, ranges["length_penalty"], "beams.length_penalty")
    if width is None:
        raise InvalidRequest(WIDTH, "must be given")
    require(1 <= num_outputs <= width, "n", f"in [1, {width}] (the number of beams)", num_outputs)
    return BeamSearch(width, num_outputs, 1.0 if penalty is None else penalty, given.early_stopping or False)
