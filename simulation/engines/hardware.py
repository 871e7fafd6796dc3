"""Simulated hardware: durations of passes, network delays, and presets of both by name.

Contains only laws of time, which take a minute to measure on other hardware. The large pairs use the laws of
`core.costs.pass_law`, which can also slow real engines down; "this-machine" was measured (docs/log/2026-11.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from core.costs import PASS_LAWS, PassLaw


@dataclass(frozen=True, slots=True)
class EngineLaw:
    """Law of one engine: duration of a pass, and limits of its rows."""

    pass_s: PassLaw
    max_step_tokens: int = 512
    prefill_chunk_tokens: int = 256


@dataclass(frozen=True, slots=True)
class HopLaw:
    """Network delay of a call, both ways together."""

    round_trip_s: float
    jitter: float = 0.0
    """Mean of an additional exponential delay, as a share of the round trip."""

    def one_way_s(self, random: Random) -> float:
        extra = self.jitter * random.expovariate(1.0) if self.jitter else 0.0
        return self.round_trip_s / 2.0 * (1.0 + extra)


NEAR = HopLaw(0.001)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One replica of each model, and the network to each."""

    about: str
    target: EngineLaw
    draft: EngineLaw
    target_hop: HopLaw
    draft_hop: HopLaw


def large_target(pass_s: float) -> EngineLaw:
    """A memory-bound target whose passes of a few rows take `pass_s` seconds."""
    return _on_gpu(PassLaw.memory_bound(pass_s))


def small_draft(pass_s: float, flat_rows: int = 64) -> EngineLaw:
    """A draft on a small GPU: `pass_s` seconds up to `flat_rows` rows, proportional beyond."""
    return _on_gpu(PassLaw.flat(pass_s, flat_rows))


def _on_gpu(law: PassLaw) -> EngineLaw:
    return EngineLaw(law, max_step_tokens=2048)


def _pair(about: str, target: str, draft: str, draft_hop: HopLaw = NEAR) -> Hardware:
    """Two models of `PASS_LAWS`. The target is on the orchestrator's network (`NEAR`)."""
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
