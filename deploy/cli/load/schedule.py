"""When requests are sent: decided before the run, so that no response can delay a later request."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Arrivals = Literal["poisson", "constant"]


def arrivals_s(num: int, rate_per_s: float, kind: Arrivals, ramp_s: float, seed: int) -> NDArray[np.float64]:
    """The times of `num` requests; the rate rises from 0 to `rate_per_s` within `ramp_s`, and stays there.

    Takes a Poisson process of unit rate, or whole numbers, through the inverse of the expected number of arrivals.
    """
    if kind == "poisson":
        work: NDArray[np.float64] = np.random.default_rng(seed).exponential(size=num).cumsum()
    else:
        work = np.arange(num, dtype=np.float64)
    in_ramp = rate_per_s * ramp_s / 2
    ramped = np.sqrt(2 * work * ramp_s / rate_per_s)
    times: NDArray[np.float64] = np.asarray(
        np.where(work < in_ramp, ramped, ramp_s / 2 + work / rate_per_s), dtype=np.float64
    )
    return times


def starts_s(concurrency: int, ramp_s: float) -> NDArray[np.float64]:
    """When each of the callers of a closed loop sends its first request."""
    return np.linspace(0.0, ramp_s, concurrency, endpoint=False, dtype=np.float64)
