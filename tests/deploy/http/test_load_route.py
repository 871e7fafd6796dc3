"""`GET /metrics`: what a picker of an inference gateway reads, by the parser of Prometheus' own client."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from core.records import EngineStats
from deploy.api.authentication import Authenticator
from tests.deploy.grpc.rpc import CONFIG, INFO, REPORT, Script
from tests.deploy.http.clients import hosted, servicer
from tests.deploy.http.test_http_servicer import call, respond

MODEL = {"model_name": "pair"}
BLOCK_TOKENS = CONFIG.target.engine.block_tokens
BLOCKS_EACH = INFO.kv_cache_tokens // BLOCK_TOKENS


def engine(num_blocks: int, num_free: int) -> EngineStats:
    zeros = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    return EngineStats(**{**zeros, "num_blocks": num_blocks, "num_free_blocks": num_free})


def models(*targets: EngineStats, replicas: int = 0, waiting: int = 0):
    async def stats() -> Sequence[EngineStats]:
        return targets

    script = Script()
    script.num_waiting = waiting
    found = hosted(script)
    found.all[0].target_stats = stats
    found.all[0].num_replicas = {"target": replicas} if replicas else {}
    return found


async def scraped(found) -> dict[str, tuple[dict[str, str], float]]:
    head, body = await respond(replace_models(found), call("/metrics", "GET"))
    assert head.status == 200
    assert dict(head.headers)["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(body.decode()))
    assert {family.type for family in families} == {"gauge"}
    return {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}


def replace_models(found):
    http = servicer(Script())
    http._models = found
    return http


async def test_pickers_find_queue_load_and_kv_under_the_names_that_they_know():
    found = await scraped(models(engine(100, 25), engine(100, 75), replicas=2, waiting=3))
    assert found["vllm:num_requests_running"] == (MODEL, REPORT.num_sessions)
    assert found["vllm:num_requests_waiting"] == (MODEL, 3)
    assert found["vllm:kv_cache_usage_perc"] == (MODEL, 0.5)
    labels = {**MODEL, "block_size": str(BLOCK_TOKENS), "num_gpu_blocks": str(2 * BLOCKS_EACH)}
    assert found["vllm:cache_config_info"] == (labels, 1)
    assert len(found) == 4


async def test_before_the_first_session_nothing_is_in_use_of_one_target():
    found = await scraped(models())
    assert found["vllm:kv_cache_usage_perc"] == (MODEL, 0)
    assert found["vllm:cache_config_info"][0]["num_gpu_blocks"] == str(BLOCKS_EACH)


async def test_it_asks_for_no_key(tmp_path):
    (tmp_path / "tokens").write_text("secret")
    guarded = servicer(Script(), authenticator=Authenticator(tmp_path / "tokens"))
    assert (await respond(guarded, call("/metrics", "GET")))[0].status == 200
