"""A server and its address, what is asked of it, and one prompt sent to it with the chunks that came back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal, cast

import grpc
from typer import Option

from core.ranges import Range, ranges_of
from core.records import BeamSearch, GenerationRequest, Policy, Sampling
from deploy.cli.options import number, parameter
from outrider_client import Chunk, Client, Finish, GenerateFields, OutriderError, Stream, Verification

DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT = 9000, 8000
MAX_RETRIES = 3
"""In a row: enough to go on with another replica; the first refusal is told within half a second."""
BEARER_VARIABLE = "OUTRIDER_TOKEN"
"""Environment variable with the token for the server: other users can read what stands on a command line."""


def bearer_token() -> str | None:
    """The token from the environment; None without one."""
    return os.environ.get(BEARER_VARIABLE, "").strip() or None


def explain(error: OutriderError, client: Client, address: str) -> str:
    """The error in a line; where no server answers, how to start one."""
    if error.code is grpc.StatusCode.UNAVAILABLE and not client.is_serving():
        return f"no server answers at {address}; start one with: outrider serve"
    return str(error)


@dataclass(frozen=True)
class CallOptions:
    """The server, the requests, and how streams are shown."""

    address: Annotated[str, Option(metavar="HOST:PORT", help="Address of the server.")] = (
        f"localhost:{DEFAULT_GRPC_PORT}"
    )
    model: Annotated[str | None, Option(metavar="NAME", help="One of the models that the server has.")] = None
    max_tokens: Annotated[int | None, number(Range(1, 2**31 - 1, is_whole=True), "Tokens of output at most")] = None
    temperature: Annotated[float | None, parameter(Sampling, "temperature", metavar="T")] = None
    top_k: Annotated[int | None, parameter(Sampling, "top_k")] = None
    top_p: Annotated[float | None, parameter(Sampling, "top_p", metavar="P")] = None
    seed: Annotated[
        int | None,
        number(
            ranges_of(Sampling)["seed"],
            "The same seed gives the same text, except with a --verification other than coupled",
            metavar="S",
        ),
    ] = None
    beam_width: Annotated[
        int | None,
        number(
            ranges_of(BeamSearch)["width"], "Search the likeliest output with N beams; it is shown when it has ended"
        ),
    ] = None
    length_penalty: Annotated[float | None, parameter(BeamSearch, "length_penalty", metavar="X")] = None
    stop: Annotated[
        list[str] | None, Option(metavar="TEXT", help="End the output before this text; may be repeated.")
    ] = None
    verification: Annotated[Verification | None, Option(help="How the target verifies the draft's guesses.")] = None
    lenience: Annotated[float | None, parameter(GenerationRequest, "lenience", metavar="L")] = None
    policy: Annotated[Policy | None, Option(help="How the draft length is chosen.")] = None
    pipelining: Annotated[
        bool | None,
        Option(
            "--pipelining/--no-pipelining", help="Draft the next block while the last one is verified, or alternate."
        ),
    ] = None
    guesser: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Source of guesses: draft, prompt_lookup and others that the server has; may be repeated.",
        ),
    ] = None
    template: Annotated[
        str | None,
        Option(
            metavar="REGEX",
            help="Regular expression of the usual output. A hint for guessing; does not constrain the output.",
        ),
    ] = None
    draft_temperature: Annotated[float | None, parameter(GenerationRequest, "draft_temperature", metavar="T")] = None
    learning: Annotated[
        bool | None, Option("--learning/--no-learning", help="Whether parts may be kept for training drafts.")
    ] = None
    no_draft: Annotated[bool, Option("--no-draft", help="Decode without guesses of any source.")] = False
    color: Annotated[
        Literal["auto", "always", "never"], Option(help="Colour guessed tokens; auto does so in a terminal.")
    ] = "auto"

    def fields(self) -> GenerateFields:
        """The fields of each request."""
        given = {
            **{each.name: getattr(self, each.name) for each in fields(CallOptions)},
            "guessers": self.guesser,
            "max_draft_tokens": 0 if self.no_draft else None,
        }
        return cast("GenerateFields", {name: given[name] for name in given if name in GenerateFields.__annotations__})


def problem_of_call(options: CallOptions) -> str | None:
    """Why nothing can be asked with these options and this token; gRPC's own message about a token is long."""
    token = bearer_token()
    if token is not None and not (token.isascii() and token.isprintable()):
        return f"{BEARER_VARIABLE} must be of printable ASCII characters"
    if options.length_penalty is not None and options.beam_width is None:
        return "--length-penalty must not be given without --beam-width"
    guessing = {
        "--guesser": options.guesser,
        "--template": options.template,
        "--draft-temperature": options.draft_temperature,
    }
    given = next((name for name, value in guessing.items() if value is not None), None)
    if options.no_draft and given is not None:
        return f"{given} must not be given beside --no-draft, which makes no guesses"
    return None


@dataclass
class Job:
    """One prompt, and the chunks of its stream so far."""

    prompt: str
    """Empty where the fields have a chat or a source instead."""
    fields: GenerateFields
    began_s: float = 0.0
    duration_s: float = 0.0
    """Seconds from the call to the last chunk, as seen by the client."""
    chunks: list[Chunk] = field(default_factory=list)

    def run(self, client: Client, show: Callable[[Chunk], None] = lambda _: None) -> Job:
        """Stream to the end; `show` is given each chunk as it comes. Raises: OutriderError."""
        return self.read(self.stream(client), show)

    def stream(self, client: Client) -> Stream:
        """The stream that `read` reads; nothing is sent before that."""
        has_other = "messages" in self.fields or self.fields.get("source") is not None
        return client.stream(None if has_other and not self.prompt else self.prompt, **self.fields)

    def read(self, stream: Stream, show: Callable[[Chunk], None]) -> Job:
        """Read to the end, or until another thread closes the stream. Raises: OutriderError."""
        self.began_s = time.monotonic()
        with stream:
            for chunk in stream:
                self.duration_s = time.monotonic() - self.began_s
                self.chunks.append(chunk)
                show(chunk)
        return self

    @property
    def finish(self) -> Finish:
        finish = self.chunks[-1].finish
        assert finish is not None, "a stream without a last chunk raises"
        return finish

    @property
    def explanation(self) -> tuple[str, ...]:
        """The explanations of its rounds, if they were asked for."""
        return tuple(line for chunk in self.chunks for line in chunk.explanation)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for chunk in self.chunks for token_id in chunk.token_ids)
