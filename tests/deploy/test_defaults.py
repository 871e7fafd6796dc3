"""Default settings of a pair: a table of machines, none of which need be here."""

from __future__ import annotations

import json

import pytest

from deploy.cli.serve import ServeOptions, explained
from deploy.defaults import Facts, decide, describe_settings, detect_facts
from deploy.settings import DEMO_DIRECTORY, service_config
from deploy.sources import Setting
from tests.deploy.cli.parsing import parsed

TARGET, DRAFT = (str(DEMO_DIRECTORY / role) for role in ("target", "draft"))


def chosen(facts):
    return {setting.name: setting.value for setting in decide(facts)[0]}


@pytest.mark.parametrize(
    ("num_gpus", "dtypes", "expected"),
    [
        (0, {"target": "bfloat16", "draft": "bfloat16"}, {"target.engine.num_threads": 2}),
        (0, {"target": "bfloat16"}, {"target.engine.dtype": "float32"}),
        (1, {"target": "bfloat16"}, {"target.num_gpus": 1.0, "target.engine.kv_memory_share": 0.8}),
        (
            1,
            {"target": "bfloat16", "draft": "bfloat16"},
            {"target.num_gpus": 0.7, "draft.num_gpus": 0.3, "target.engine.kv_memory_share": 0.7},
        ),
        (2, {"target": "float32", "draft": "bfloat16"}, {"target.num_gpus": 1.0, "draft.num_gpus": 1.0}),
        (8, {"target": "float16"}, {"target.engine.dtype": "bfloat16"}),
        (1, {"target": "float32"}, {"target.engine.dtype": "float32"}),
        (1, {"target": None}, {"target.engine.dtype": "bfloat16", "target.engine.device": "cuda"}),
        (1, {"target": None}, {"target.engine.kv_cache_tokens": None, "target.engine.compile": True}),
        (2, {"target": None, "draft": None}, {f"{role}.engine.max_step_tokens": 2048 for role in ("target", "draft")}),
        (1, {"target": None}, {"target.engine.prefill_chunk_tokens": 1024}),
    ],
)
def test_a_machine_and_what_is_taken_there(num_gpus, dtypes, expected):
    found = chosen(Facts(num_gpus, 4, dtypes))
    assert expected.items() <= found.items()
    assert {name.partition(".")[0] for name in found} <= set(dtypes)


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("dtypes", [{"target": "bfloat16"}, {"target": "float16", "draft": "float32"}])
def test_every_decision_is_a_configuration_and_shares_add_up(num_gpus, dtypes):
    found = chosen(Facts(num_gpus, 4, dtypes))
    given = [Setting("target.engine.model", TARGET, "t"), Setting("target.engine.deterministic", False, "t")]
    given += [Setting(name, value, "t") for name, value in found.items()]
    config = service_config(None, given if "draft" in dtypes else [Setting("draft", None, "t"), *given])
    if len(dtypes) > num_gpus:
        assert sum(found[f"{role}.engine.kv_memory_share"] for role in dtypes) <= 1
        assert sum(found[f"{role}.num_gpus"] for role in dtypes) <= 1
    assert "device cuda" in describe_settings(config)[0]
    assert "attention paged, in place, blocks of 64, steps CUDA graphs" in describe_settings(config)[0]


@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", "bfloat16"), ("float16", "bfloat16"), (None, "float32")])
def test_a_processor_with_bfloat16_keeps_weights_of_16_bits(stored, dtype):
    found = chosen(Facts(0, 4, {"target": stored, "draft": "float32"}, has_bfloat16=True))
    assert (found["target.engine.dtype"], found["draft.engine.dtype"]) == (dtype, "float32")
    _, reasons = decide(Facts(0, 4, {"target": stored}, has_bfloat16=True))
    assert [reason.partition(";")[0] for reason in reasons[1:]] == (
        ["target: float16 is rounded to bfloat16"] if stored == "float16" else []
    )


def test_reasons_say_what_was_seen():
    assert "2 threads an engine of 2 CPUs" in decide(Facts(0, 2, {"target": None}))[1][0]
    assert "1 thread an engine of 2 CPUs" in decide(Facts(0, 2, {"target": None, "draft": None}))[1][0]
    _, shared = decide(Facts(1, 8, {"target": "float16", "draft": "bfloat16"}))
    assert "1 GPU, which both models share" in shared[0]
    assert shared[1] == "target: bfloat16, since float16 is not computed here"


def test_what_is_given_goes_before_what_is_here(monkeypatch):
    monkeypatch.setattr(
        "deploy.cli.serve.detect_facts", lambda *_: Facts(1, 4, {"target": "bfloat16", "draft": "bfloat16"})
    )
    argv = ("--target", TARGET, "--draft", DRAFT, "--target.engine.device", "cpu", "--dtype", "float32")
    config, sources = explained(parsed(ServeOptions, argv))
    assert (config.target.engine.device, sources.of("target.engine.device")) == ("cpu", "--target.engine.device")
    assert config.draft is not None
    assert (config.draft.engine.device, sources.of("draft.engine.device")) == ("cuda", "what is here")
    assert (config.target.engine.dtype, config.draft.engine.dtype) == ("float32", "float32")


def test_the_facts_of_a_checkpoint(tmp_path):
    assert detect_facts(DEMO_DIRECTORY / "target", None).dtypes == {"target": "bfloat16"}
    assert detect_facts(tmp_path, tmp_path).dtypes == {"target": None, "draft": None}
    (tmp_path / "config.json").write_text(json.dumps({"dtype": None, "text_config": {"torch_dtype": "bfloat16"}}))
    assert detect_facts(tmp_path, None).dtypes == {"target": "bfloat16"}
