"""A law of agreement from one number, for pairs without traces.

Knows how the demo pair's figures depend on each other (docs/simulation.md), and assumes the same of other pairs. Tokens
agree independently of each other, which those of real text do not.
"""

from __future__ import annotations

from core.speculation import miss_curve
from simulation.engines.texts import SteadyLaw

NUM_RANKS = 33


def steady_law(acceptance: float, temperature: float) -> SteadyLaw:
    """The law of a pair whose coupled acceptance (at T = 0: greedy agreement) is `acceptance`."""
    rest = 1.0 - acceptance
    tail = [rest * (miss_curve(rank - 1) - miss_curve(rank)) for rank in range(1, NUM_RANKS)]
    shares = (acceptance, *tail)
    if temperature == 0:
        return SteadyLaw(shares, shares, acceptance)
    return SteadyLaw(shares, _shares_without_noise(acceptance, temperature), rejection_acceptance(acceptance))


def rejection_acceptance(coupled: float) -> float:
    """Between coupled acceptance and the most that goes with it, 2a / (1 + a), where it was measured to be.

    Source: the bound is Daliri et al. 2024, (1 - TV) / (1 + TV) <= a.
    """
    most = 2.0 * coupled / (1.0 + coupled)
    return coupled + 0.4 * (most - coupled)


def _shares_without_noise(acceptance: float, temperature: float) -> tuple[float, ...]:
    """Ranks of the target's sample by the draft's own order: the hotter, the flatter, fitted at T = 0, 0.7 and 1."""
    heat = min(temperature, 1.0)
    head, exponent = acceptance * (1.0 - 0.5 * heat**2), 1.2 - 0.92 * heat
    tail = [(1.0 - head) * (rank**-exponent - (rank + 1) ** -exponent) for rank in range(1, NUM_RANKS)]
    return (head, *tail)
