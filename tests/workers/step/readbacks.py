"""Reads back at once what is asked of a device, and counts the waits for one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workers.sampling import sampler
from workers.step.transfer import Readback


def at_once(ask: Callable[..., Callable[[], Any]], *args: Any) -> Any:
    """The result that `ask(*args, readback)` promises."""
    readback = Readback()
    found = ask(*args, readback)
    readback.wait()
    return found()


class Waits(TorchDispatchMode):
    """Counts what would make Python wait for a GPU, on a CPU, where nothing does.

    Those are looks at numbers, operations whose result has a size that depends on numbers, lists as indices, and
    tensors that are made on the device or sent there by anything but `upload`. The readback itself counts once.
    """

    LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._is_reading = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in {"index", "index_put", "index_put_"} else ()
        by_mask = any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in indices)
        by_number = (
            name == "repeat_interleave" and "Tensor" in func._overloadname and (kwargs or {}).get("output_size") is None
        )
        if name in self.LOOKS or by_mask or by_number:
            self.observe(name)
        return func(*args, **(kwargs or {}))

    def observe(self, name: str) -> None:
        if not self._is_reading:
            self.seen.append(name)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A readback, which is one wait however it is done."""
        self.observe("readback")
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """The waits while this lasts."""
    waits = Waits()
    wait = Readback.wait

    def read(self: Readback) -> None:
        if not self._wanted:
            return
        with waits.reading():
            wait(self)

    def spied(owner: Any, name: str, *, is_seen: Callable[..., bool] = lambda *_, **__: True) -> None:
        original = getattr(owner, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            if is_seen(*args, **kwargs):
                waits.observe(name)
            return original(*args, **kwargs)

        patch.setattr(owner, name, spy)

    def by_list(*args: Any, **_: Any) -> bool:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(each, list) for each in index)

    def names_a_device(*args: Any, **kwargs: Any) -> bool:
        named = (*args[1:], kwargs.get("device"))
        return any(isinstance(each, (torch.device, str)) for each in named)

    def sends_from_ours(*args: Any, **kwargs: Any) -> bool:
        """Models say it of tensors that are there already."""
        return names_a_device(*args, **kwargs) and not sys._getframe(2).f_globals["__name__"].startswith("transformers")

    with monkeypatch.context() as patch, waits:
        patch.setattr(Readback, "wait", read)
        patch.setattr(sampler, "argmax", lambda scores: torch.Tensor.argmax(scores, dim=-1))  # as on a GPU
        patch.setattr(sampler, "_outside_nucleus_on_cpu", sampler._outside_nucleus)
        patch.setattr(sampler, "_drawn_on_cpu", sampler._drawn)
        patch.setattr(Readback, "argmax", Readback._add_argmax)
        for name in ("tolist", "numpy", "cpu", "new_tensor"):
            spied(torch.Tensor, name)
        for name in ("__getitem__", "__setitem__"):
            spied(torch.Tensor, name, is_seen=by_list)
        spied(torch.Tensor, "to", is_seen=sends_from_ours)
        for name in ("tensor", "as_tensor"):
            spied(torch, name, is_seen=names_a_device)
        yield waits
