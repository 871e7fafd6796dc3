"""The part of `bench gpu` with processes of their own: what it serves, and that it runs to its end on a CPU."""

from __future__ import annotations

import argparse

import pytest

from bench.gpu import report, served

PLACES = (served.DRAFT, served.AT_TARGET, served.AT_DRAFT)


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return parser.parse_args(argv)


def test_all_engines_of_a_service_share_one_gpu(tmp_path):
    found = served.services(tmp_path, tmp_path / "head", arguments("--device=cuda"))
    assert tuple(found) == PLACES
    for config in found.values():
        engines = [each for each in (config.target, config.draft) if each is not None]
        assert sum(each.num_gpus for each in engines) <= 1
        assert {each.engine.device for each in engines} == {"cuda"}
    heads = [(each.target.engine.head is not None, each.draft and each.draft.engine.head) for each in found.values()]
    assert heads == [(False, None), (True, None), (False, str(tmp_path / "head"))]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_place_is_measured_and_no_completion_differs(tmp_path):
    small = {"only": "served", "device": "cpu", "dtype": "float32", "size": "8M", "cache": tmp_path}
    few = {"prompts": 1, "tokens": 16, "repeats": 1}
    given = arguments(*(f"--{name}={value}" for name, value in {**small, **few}.items()))
    results = {each.name: each for each in report.measure(given)}
    assert not [name for name in results if "failures" in name]
    for place in PLACES:
        assert results[f"{place}: pipelined over plain"].value > 0
        assert results[f"{place}: completions unlike plain decoding"].value == 0
        assert results[f"{place}: tokens a round, pipelined"].value >= 1
    assert results[f"{served.DRAFT}: pipelined over in turn"].goal is not None
