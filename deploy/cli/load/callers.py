"""The interface through which load is sent, and its implementation by gRPC.

Nothing is retried: refusals are part of the measurement.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from deploy.cli.load.records import Arrival, Counts, LoadRequest
from outrider_client import AsyncClient, OutriderError, Overloaded, Retry


class CallFailed(Exception):
    """A request was refused or failed; `reason` is short, so that equal ones can be counted."""

    def __init__(self, reason: str, message: str, *, is_refusal: bool) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.is_refusal = is_refusal


class LoadCaller(Protocol):
    """Sends requests to one service."""

    def stream(self, request: LoadRequest) -> AsyncGenerator[Arrival, None]:
        """The pieces as they arrive; closing the generator cancels the request. Raises: CallFailed."""
        ...

    async def vocab_size(self) -> int:
        """Size of the vocabulary; prompts may have token ids below it. Raises: CallFailed."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Fields:
    """Request fields with the same value in all requests of a run."""

    model: str | None
    temperature: float | None
    ignore_eos: bool
    no_draft: bool


class GrpcCaller:
    """Sends requests with `outrider_client`."""

    def __init__(self, address: str, token: str | None, fields: Fields) -> None:
        self._client = AsyncClient(address, token=token, retry=Retry(max_retries=0))
        self._fields = fields

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Arrival, None]:
        """Raises: CallFailed."""
        fields = self._fields
        is_text = isinstance(request.prompt, str)
        try:
            async with self._client.stream(
                request.prompt if is_text else None,  # type: ignore[arg-type]
                token_ids=None if is_text else request.prompt,  # type: ignore[arg-type]
                max_tokens=request.max_tokens,
                seed=request.seed,
                model=fields.model,
                temperature=fields.temperature,
                ignore_eos=fields.ignore_eos,
                max_draft_tokens=0 if fields.no_draft else None,
            ) as stream:
                async for chunk in stream:
                    stats = chunk.finish.speculation if chunk.finish is not None else None
                    counts = Counts.of(stats) if stats is not None else None
                    yield Arrival(len(chunk.token_ids), chunk.usage.prompt_tokens, counts)
        except OutriderError as error:
            raise _failure(error) from None

    async def vocab_size(self) -> int:
        """Raises: CallFailed."""
        try:
            return (await self._client.model_info(model=self._fields.model)).target.vocab_size
        except OutriderError as error:
            raise _failure(error) from None

    async def close(self) -> None:
        await self._client.close()


def _failure(error: OutriderError) -> CallFailed:
    return CallFailed(error.code.name, error.message, is_refusal=isinstance(error, Overloaded))
