"""Each number of a request is taken at both ends of its range, and refused one step outside, by its name."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from core.config import Limits, SpeculationConfig
from core.errors import ConfigError, InvalidRequest
from core.ranges import Range, ranges_of, shown
from core.records import BIAS, Sampling

SAMPLING = ranges_of(Sampling)

SUBNORMAL = 5e-324
"""The smallest positive double; in float32 it is 0."""
NOT_NUMBERS = (math.nan, math.inf, -math.inf)


def below(value):
    return value - 1 if isinstance(value, int) else math.nextafter(value, -math.inf)


def above(value):
    return value + 1 if isinstance(value, int) else math.nextafter(value, math.inf)


def inside(allowed):
    lowest = above(allowed.low) if allowed.excludes_low else allowed.low
    return [lowest, above(lowest), below(allowed.high), allowed.high]


def outside(allowed):
    too_low = allowed.low if allowed.excludes_low else below(allowed.low)
    return [too_low if too_low or not allowed.zero else below(too_low), above(allowed.high)]


@pytest.mark.parametrize("name", SAMPLING)
def test_the_ends_of_each_range_are_taken(name):
    values = [*inside(SAMPLING[name]), *([0, -0.0] if SAMPLING[name].zero == "greedy" else [])]
    for value in values:
        assert getattr(replace(Sampling(), **{name: value}), name) == value


@pytest.mark.parametrize("name", SAMPLING)
def test_what_is_outside_is_refused_with_the_field_the_range_and_the_value(name):
    allowed = SAMPLING[name]
    for value in [*outside(allowed), *([] if allowed.is_whole else NOT_NUMBERS)]:
        with pytest.raises(InvalidRequest) as caught:
            replace(Sampling(), **{name: value})
        assert caught.value.field == name
        assert caught.value.problem.startswith(f"must be {allowed}, got ")


@pytest.mark.parametrize("bias", [*outside(BIAS), *NOT_NUMBERS])
def test_a_wrong_bias_names_its_token(bias):
    with pytest.raises(InvalidRequest, match=r"logit_bias\[7\]: must be in \[-100, 100\]"):
        Sampling(logit_bias=((8, 100.0), (9, -100.0), (7, bias)))


def test_subnormal_numbers_are_taken_where_they_are_in_range_and_refused_as_temperatures():
    for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty"):
        assert getattr(replace(Sampling(), **{name: SUBNORMAL}), name) == SUBNORMAL
    assert Sampling(logit_bias=((7, SUBNORMAL),)).logit_bias == ((7, SUBNORMAL),)
    for name in ("temperature", "repetition_penalty"):
        for value in (SUBNORMAL, -SUBNORMAL, 1e-38):
            with pytest.raises(InvalidRequest, match=f"^{name}: "):
                replace(Sampling(), **{name: value})


def test_a_fraction_is_refused_where_a_whole_number_is_meant():
    with pytest.raises(InvalidRequest, match=r"top_k: must be a whole number, got 50\.0"):
        Sampling(top_k=50.0)


def test_every_number_of_sampling_has_a_range():
    assert SAMPLING.keys() == {field.name for field in fields(Sampling)} - {
        "logit_bias",
        "suppressed_ids",
        "allowed_token_ids",
        "bad_words",
    }


def test_ranges_say_themselves():
    assert str(SAMPLING["temperature"]) == "0 (greedy) or in [0.001, 100]"
    assert str(SAMPLING["top_k"]) == "0 (keeps all) or in [1, 2147483647]"
    assert str(SAMPLING["top_p"]) == "in (0, 1]"
    assert str(SAMPLING["seed"]) == f"in [0, {2**64 - 1}]"
    assert 0 not in Range(1, 5)
    assert [str(Range(low, math.inf, excludes_low=low == 0)) for low in (0, 1, 0.5)] == [
        "above 0",
        "at least 1",
        "at least 0.5",
    ]


def test_a_negative_number_in_an_unsigned_field_is_shown_as_it_was_written():
    assert shown(2**32 - 1) == "4294967295 (-1 as an unsigned 32-bit number)"
    assert shown(2**31) == "2147483648 (-2147483648 as an unsigned 32-bit number)"
    assert [shown(value) for value in (2**31 - 1, 2**32, -1, 0.5, "x")] == [
        "2147483647",
        "4294967296",
        "-1",
        "0.5",
        "'x'",
    ]


@pytest.mark.parametrize(("config", "name"), [(Limits, "max_sessions"), (SpeculationConfig, "breaker_rounds")])
def test_settings_are_refused_outside_their_ranges_by_name(config, name):
    assert getattr(config(**{name: 1}), name) == 1
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        config(**{name: 0})


def test_a_setting_that_may_be_none_has_a_range_otherwise():
    assert Limits(default_max_tokens=None).default_max_tokens is None
    with pytest.raises(ConfigError, match="default_max_tokens must be at least 1, got 0"):
        Limits(default_max_tokens=0)
