"""Hardware to simulate: how long passes take, how far engines are, and some of both by name.

Laws of time, nothing else, of the kind that one can measure on one's own hardware in a minute. The large pairs' are
those that a real engine can be paced as (`core.costs.pass_law`); "this-machine" was measured (docs/log/2026-11.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from core.costs import PASS_LAWS, PassLaw


@dataclass(frozen=True, slots=True)
class EngineLaw:
    """One engine: the law of its passes, and the most rows of one."""

    pass_s: PassLaw
    max_step_tokens: int = 512
    prefill_chunk_tokens: int = 256


@dataclass(frozen=True, slots=True)
class HopLaw:
    """The wire's share of a call, there and back."""

    round_trip_s: float
    jitter: float = 0.0
    """Mean of the exponential delay that comes on top, as a share of the round trip."""

    def one_way_s(self, random: Random) -> float:
        extra = self.jitter * random.expovariate(1.0) if self.jitter else 0.0
        return self.round_trip_s / 2.0 * (1.0 + extra)


NEAR = HopLaw(0.001)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One replica of each model, and the way to each."""

    about: str
    target: EngineLaw
    draft: EngineLaw
    target_hop: HopLaw
    draft_hop: HopLaw


def large_target(pass_s: float) -> EngineLaw:
    """A target bound by memory, with this duration for a few rows."""
    return _on_gpu(PassLaw.memory_bound(pass_s))


def small_draft(pass_s: float, flat_rows: int = 64) -> EngineLaw:
    """A draft on a small GPU: constant up to a number of rows, and in proportion beyond."""
    return _on_gpu(PassLaw.flat(pass_s, flat_rows))


def _on_gpu(law: PassLaw) -> EngineLaw:
    return EngineLaw(law, max_step_tokens=2048)


def _pair(about: str, target: str, draft: str, draft_hop: HopLaw = NEAR) -> Hardware:
    """Two of the models that have a law by name, the target near."""
    return Hardware(about, _on_gpu(PASS_LAWS[target]), _on_gpu(PASS_LAWS[draft]), NEAR, draft_hop)


PRESETS = {
    "70b+1b": _pair("70B on four big GPUs, 1B on a small one", "70b", "1b"),
    "32b+0.6b": _pair("32B on two big GPUs, 0.6B on a small one", "32b", "0.6b"),
    "8b+0.5b": _pair("8B and 0.5B on a big GPU each", "8b", "0.5b"),
    "far-draft": _pair(
        "70B and 1B with 10 ms of network between draft and orchestrator", "70b", "1b", HopLaw(0.010, jitter=0.2)
    ),
    "this-machine": Hardware(
        "123M and 6M parameters in bf16, one core of a 2-core CPU each",
        EngineLaw(PassLaw(((1, 0.0365), (2, 0.0367), (5, 0.0399), (8, 0.0439), (16, 0.055), (32, 0.077)))),
        EngineLaw(PassLaw(((1, 0.0044), (2, 0.0046), (5, 0.0051), (8, 0.0054), (16, 0.0062), (32, 0.0078)))),
        HopLaw(0.0012, jitter=0.2),
        HopLaw(0.0012, jitter=0.2),
    ),
}
