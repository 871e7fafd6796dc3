"""Loads and unloads LoRA adapters while a model is served, with vLLM's paths and fields.

Knows the models and their lists of adapters. Must not know engines.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated

from core.errors import InvalidRequest, StartupError, UnknownModel
from core.records import Adapter
from deploy.api import AdapterStore, Hosted, Models, require
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
    model = models[body.base_model_name or ""]
    store, name, path = _store_of(model), body.lora_name, body.lora_path
    if model.served.adapter is not None:
        raise InvalidRequest("base_model_name", f"must be a model, and {model.name!r} is an adapter")
    is_fit = 1 <= len(name) <= MAX_NAME_CHARS and name.isprintable()
    require(is_fit, "lora_name", f"1 to {MAX_NAME_CHARS} printable characters", name)
    require(PurePath(path).is_absolute(), "lora_path", "an absolute path on the nodes of the targets", path)
    await model.look_for_adapters()
    if any(each.name == name for each in models.named):
        raise InvalidRequest("lora_name", f"must be a new name: there is a model or an adapter {name!r} already")
    try:
        await store.load(Adapter(name, path))
    except StartupError as error:
        raise InvalidRequest("lora_path", str(error)) from None
    await model.look_for_adapters()
    return f"Success: LoRA adapter '{name}' added successfully.".encode()


async def unload_adapter(models: Models, body: UnloadAdapterBody) -> bytes:
    """Returns vLLM's reply. Raises: RequestError."""
    name = body.lora_name
    for model in [each for each in models.all if each.adapter_store is not None] or [models[""]]:
        store = _store_of(model)
        await model.look_for_adapters()
        if name in model.loaded_adapters:
            await store.unload(name)
            await model.look_for_adapters()
            return f"Success: LoRA adapter '{name}' removed successfully.".encode()
        if name in model.adapters:
            raise InvalidRequest("lora_name", f"must not be {name!r}: the settings name it, in target.engine.adapters")
    raise UnknownModel(f"there is no adapter {name[:MAX_NAME_CHARS]!r} here")


def _store_of(model: Hosted) -> AdapterStore:
    """Raises: UnknownPath if the model's adapters cannot be changed."""
    if model.adapter_store is None:
        raise UnknownPath("adapters are not loaded while this model is served: its setting http.load_adapters is off")
    return model.adapter_store
