"""A law of agreement from one number, for pairs without recordings.

Assumes that the acceptances of a pair at other temperatures and ranks relate to each other as the demo pair's do
(docs/simulation.md). Tokens agree independently of each other, unlike in real text.
"""

from __future__ import annotations

from core.speculation import miss_curve
from simulation.engines.texts import SteadyLaw

NUM_RANKS = 33


def steady_law(acceptance: float, temperature: float) -> SteadyLaw:
    """The law of a pair with this coupled acceptance (at T = 0: this greedy agreement)."""
    rest = 1.0 - acceptance
    tail = [rest * (miss_curve(rank - 1) - miss_curve(rank)) for rank in range(1, NUM_RANKS)]
    shares = (acceptance, *tail)
    if temperature == 0:
        return SteadyLaw(shares, shares, acceptance)
    return SteadyLaw(shares, _shares_without_noise(acceptance, temperature), rejection_acceptance(acceptance))


def rejection_acceptance(coupled: float) -> float:
    """Acceptance by rejection, given coupled acceptance a: a plus 0.4 of the distance to its bound 2a / (1 + a).

    The share 0.4 was measured. Source of the bound: Daliri et al. 2024, (1 - TV) / (1 + TV) <= a.
    """
    most = 2.0 * coupled / (1.0 + coupled)
    return coupled + 0.4 * (most - coupled)


def _shares_without_noise(acceptance: float, temperature: float) -> tuple[float, ...]:
    """Distribution of the target's sample over the draft's ranks without noise: flatter when hotter. Fitted at T = 0,
    0.7, 1."""
    heat = min(temperature, 1.0)
    head, exponent = acceptance * (1.0 - 0.5 * heat**2), 1.2 - 0.92 * heat
    tail = [(1.0 - head) * (rank**-exponent - (rank + 1) ** -exponent) for rank in range(1, NUM_RANKS)]
    return (head, *tail)
