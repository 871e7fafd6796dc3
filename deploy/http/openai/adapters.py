"""Loads and unloads LoRA adapters while a model is served, with vLLM's paths and fields.

Knows the models and their lists of adapters. Must not know engines.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated

from core.errors import InvalidRequest, StartupError, UnknownModel
from core.records import Adapter
from deploy.api import Hosted, Models, require
from deploy.http.bodies import Ignored, Part, neutral
from deploy.http.failures import UnknownPath

MAX_NAME_CHARS = 256


class LoadAdapterBody(Part):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    """The model that it changes; None for the first."""
    load_inplace: Annotated[bool | None, neutral(False, reason="unload the adapter first")] = None


class UnloadAdapterBody(Part):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: Ignored = None


async def load_adapter(models: Models, body: LoadAdapterBody) -> bytes:
    """Returns vLLM's reply. Raises: RequestError, Unavailable."""
    model = _model(models, body.base_model_name or "")
    assert model.adapter_store is not None, "else there is no such path"
    name, path = body.lora_name, body.lora_path
    is_fit = 1 <= len(name) <= MAX_NAME_CHARS and name.isprintable()
    require(is_fit, "lora_name", f"1 to {MAX_NAME_CHARS} printable characters", name)
    require(PurePath(path).is_absolute(), "lora_path", "an absolute path on the nodes of the targets", path)
    await model.look_for_adapters()
    if any(each.name == name for each in models.named):
        raise InvalidRequest("lora_name", f"must be a new name: there is a model or an adapter {name!r} already")
    try:
        await model.adapter_store.load(Adapter(name, path))
    except StartupError as error:
        raise InvalidRequest("lora_path", str(error)) from None
    await model.look_for_adapters()
    return f"Success: LoRA adapter '{name}' added successfully.".encode()


async def unload_adapter(models: Models, body: UnloadAdapterBody) -> bytes:
    """Returns vLLM's reply. Raises: RequestError."""
    name = body.lora_name
    for model in [each for each in models.all if _is_open(each)] or [_model(models, "")]:
        assert model.adapter_store is not None, "else there is no such path"
        await model.look_for_adapters()
        if name in model.loaded_adapters:
            await model.adapter_store.unload(name)
            await model.look_for_adapters()
            return f"Success: LoRA adapter '{name}' removed successfully.".encode()
        if name in model.adapters:
            raise InvalidRequest("lora_name", f"must not be {name!r}: the settings name it, in target.engine.adapters")
    raise UnknownModel(f"there is no adapter {name[:MAX_NAME_CHARS]!r} here")


def _model(models: Models, name: str) -> Hosted:
    """The model with this name. Raises: UnknownPath if its adapters cannot be changed; UnknownModel."""
    model = models[name]
    if not _is_open(model):
        raise UnknownPath("adapters are not loaded while this model is served: its setting http.load_adapters is off")
    if model.served.adapter is not None:
        raise InvalidRequest("base_model_name", f"must be a model, and {name!r} is an adapter")
    return model


def _is_open(model: Hosted) -> bool:
    return model.adapter_store is not None and model.served.config.http.load_adapters
