"""Under Ray an engine sees the GPUs that it reserved, and no others: settings that forget it are refused at start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.config import DraftConfig, EngineConfig, FleetConfig, ServiceConfig, TargetConfig
from core.errors import ConfigError
from deploy.app import build
from deploy.launch import application
from deploy.serve import check_devices
from deploy.settings import parse_config


def worker(kind: Any, device: str, num_gpus: float) -> Any:
    return kind(EngineConfig("/model", device=device), num_gpus=num_gpus)


def fleet(device: str, num_gpus: float, where: str = "target") -> FleetConfig:
    plain = ServiceConfig(worker(TargetConfig, "cpu", 0), worker(DraftConfig, "cpu", 0))
    draft = worker(DraftConfig, device, num_gpus)
    match where:
        case "target":
            model = replace(plain, target=worker(TargetConfig, device, num_gpus))
        case "draft":
            model = replace(plain, draft=draft)
        case "extra_drafts.0":
            model = replace(plain, extra_drafts=(draft,))
        case _:
            return FleetConfig((replace(plain, draft=None, shared_draft="small"),), drafts={"small": draft})
    return FleetConfig((model,))


@pytest.mark.parametrize("where", ["target", "draft", "extra_drafts.0", "drafts.small"])
@pytest.mark.parametrize("check", [check_devices, build, application.check_fleet])
def test_a_gpu_that_is_not_reserved_is_refused_with_what_to_write(check: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{where}\.num_gpus must be above 0 .* write {where}\.num_gpus=1"):
        check(fleet("cuda", 0, where))


@pytest.mark.parametrize("where", ["target", "drafts.small"])
def test_a_gpu_by_its_number_is_refused_with_what_to_write(where: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{where}\.engine\.device must be cuda.* write {where}\.engine\.device=cuda"
    ):
        check_devices(fleet("cuda:1", 1, where))


@pytest.mark.parametrize(("device", "num_gpus"), [("cuda", 1), ("cuda", 0.3), ("cuda:0", 1), ("cpu", 0), ("cpu", 1)])
def test_what_works_is_not_refused(device: str, num_gpus: float) -> None:
    check_devices(fleet(device, num_gpus))


def test_of_several_models_the_one_is_named() -> None:
    wrong = fleet("cuda", 0).models[0]
    with pytest.raises(ConfigError, match=r"^models\.1\.target\.num_gpus"):
        check_devices(FleetConfig((replace(fleet("cpu", 0).models[0], model_name="a"), wrong)))


def test_float16_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"^target\.engine\.dtype must be bfloat16 or float32, to which .* 'float16'"):
        parse_config({"target": {"engine": {"model": "m", "dtype": "float16"}}})
    with pytest.raises(ConfigError, match=r"dtype must be bfloat16 or float32"):
        EngineConfig("m", dtype="float16")  # type: ignore[arg-type]
