"""Hardware to simulate, by name: how long each model's passes take, and how far the two are apart.

Laws of time, nothing else. The large pairs are round figures of the kind that published systems report; "this-machine"
was measured (docs/LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.simulation.hardware import EngineLaw, HopLaw, PassLaw


@dataclass(frozen=True, slots=True)
class Hardware:
    """One replica of each model, and the way to each."""

    about: str
    target: EngineLaw
    draft: EngineLaw
    target_hop: HopLaw
    draft_hop: HopLaw


def large_target(pass_s: float) -> EngineLaw:
    """A target bound by memory: 1.05x at 32 guesses, 1.1x at 64, by arithmetic alone from some hundreds of rows on."""
    shares = ((1, 1.0), (9, 1.0), (33, 1.05), (65, 1.1), (257, 1.35), (513, 1.8))
    return EngineLaw(PassLaw(tuple((rows, pass_s * share) for rows, share in shares)), max_step_tokens=2048)


def small_draft(pass_s: float, flat_rows: int = 64) -> EngineLaw:
    """A draft on a small GPU: the same for up to so many rows, and in proportion beyond."""
    return EngineLaw(PassLaw.flat(pass_s, flat_rows), max_step_tokens=2048)


NEAR = HopLaw(0.001)
PRESETS = {
    "70b+1b": Hardware("70B on four big GPUs, 1B on a small one", large_target(0.025), small_draft(0.003), NEAR, NEAR),
    "32b+0.6b": Hardware(
        "32B on two big GPUs, 0.6B on a small one", large_target(0.018), small_draft(0.0025), NEAR, NEAR
    ),
    "far-draft": Hardware(
        "70B and 1B with 10 ms of network between draft and orchestrator",
        large_target(0.025),
        small_draft(0.003),
        NEAR,
        HopLaw(0.010, jitter=0.2),
    ),
    "this-machine": Hardware(
        "123M and 6M parameters in bf16, one core of a 2-core CPU each",
        EngineLaw(PassLaw(((1, 0.0365), (2, 0.0367), (5, 0.0399), (8, 0.0439), (16, 0.055), (32, 0.077)))),
        EngineLaw(PassLaw(((1, 0.0044), (2, 0.0046), (5, 0.0051), (8, 0.0054), (16, 0.0062), (32, 0.0078)))),
        HopLaw(0.0012, jitter=0.2),
        HopLaw(0.0012, jitter=0.2),
    ),
}
