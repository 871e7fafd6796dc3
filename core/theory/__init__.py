"""What speculation can gain, in closed forms: for tests, documents and planning, never on the path of a request.

Knows distributions, acceptance rates and costs; must not know engines, trees or sessions. Symbols: docs/notation.md.
"""

from core.theory.laws import (
    acceptance_rate,
    acceptance_rate_of_several,
    block_survival,
    coupled_acceptance_rate,
    coupled_lower_bound,
    divergence,
    expected_accepted,
    joint_survival,
    rejection_survival,
)
from core.theory.rounds import (
    MAX_GAMMA,
    chain_tokens,
    expected_longest,
    expected_tokens,
    guaranteed_factor,
    memory_factor,
    operations_factor,
    optimal_gamma,
    oracle_factor,
    pipelined_factor,
    walltime_factor,
)
