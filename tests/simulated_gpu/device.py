"""A fake of a CUDA device: tensors whose data is on the CPU and that say cuda:0, and a mode that sees each operator.

An operator that mixes devices raises, as on a GPU; so does a wait or an upload while work is recorded. Kernels, uploads
and waits are counted. What it cannot show: time, races, CUDA's rounding, and operators that CUDA lacks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}
"""Operators after which Python waits for the device, because it needs what they find."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""These wait where an index is a mask, of which they need to know the size."""
NO_KERNEL = {"_local_scalar_dense", "_unsafe_view", "detach", "lift_fresh", "set_"}
COPIES = {"_to_copy", "copy_"}
IN_PYTHON = "outrider"
"""Namespace of the project's operators, which call others."""


class MixedDevices(RuntimeError):
    """An operator got tensors of the host and of the device."""


class NotRecordable(RuntimeError):
    """Raised for an operation that a CUDA graph cannot hold."""


@dataclass
class Counts:
    """Counts of the device's operations."""

    kernels: Counter[str] = field(default_factory=Counter)
    """By the name of the operator; those of replayed work are counted in `SimulatedGPU.recorded`."""
    uploads: int = 0
    waits: list[str] = field(default_factory=list)
    """The operator of each."""
    replays: int = 0


class SimulatedTensor(Tensor):
    """Says that it is on the GPU."""

    data_there: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: Tensor) -> SimulatedTensor:
        like = {"strides": data.stride(), "storage_offset": data.storage_offset(), "dtype": data.dtype}
        with torch.inference_mode(False):  # else torch takes it for no view of a tensor that was made outside
            return Tensor._make_wrapper_subclass(cls, data.shape, **like, device=GPU)

    def __init__(self, data: Tensor) -> None:
        self.data_there = data

    def __repr__(self) -> str:
        return f"SimulatedTensor({self.data_there!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch refuses to itself

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} outside of the simulated GPU's `with` block")


class SimulatedGPU(TorchDispatchMode):
    """Computes on simulated tensors, within its `with` block and in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.recorded = Counts()
        """Counts of the last replay."""
        self._pinned: list[Tensor] = []  # for good, so that no other tensor gets their addresses
        self._is_recording = False
        self._elementary = set[Any]()
        """Operators that do not consist of others."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        name, is_there = func.overloadpacket.__name__, _result_is_there(func, args, kwargs, tensors)
        if not is_there and not any(map(_is_there, tensors)):
            return self._on_host(func, args, kwargs)
        if func not in self._elementary:
            with self:  # what an operator consists of is seen, too
                if func.namespace == IN_PYTHON:
                    return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
                if (found := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return found
            self._elementary.add(func)
        if name in COPIES and _is_there(args[1 if name == "copy_" else 0]) != is_there:
            self._between(name, args, kwargs, is_upload=is_there)
        else:
            self._on_device(func, name, args, tensors)
        return _computed(func, args, kwargs, tensors, is_there)

    def launch(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Compute by a function of the host's tensors, as one kernel."""
        self.counts.kernels[name] += 1
        with _disable_current_modes():
            found = function(*map(_here, args))
            return _mapped(SimulatedTensor, found)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Takes the place of `CudaRecorder`: a replay does the work again."""

        def replay() -> None:
            self.counts.replays += 1
            counts, self.counts, self._is_recording = self.counts, Counts(), True
            try:
                work()
            finally:
                self.recorded, self.counts, self._is_recording = self.counts, counts, False

        replay()
        return replay

    def pin(self, tensor: Tensor) -> Tensor:
        """Takes the place of `Tensor.pin_memory`."""
        self._pinned.append(tensor.clone())
        return self._pinned[-1]

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.pop("pin_memory", False)
        found = func(*args, **kwargs)
        return self.pin(found) if is_pinned else found

    def _between(self, name: str, args: Any, kwargs: dict[str, Any], *, is_upload: bool) -> None:
        """A copy from one device to the other."""
        self._check_recordable(name)
        if not is_upload:
            self.counts.waits.append(f"{name} to the host")
            return
        self.counts.uploads += 1
        is_async = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        source = args[1 if name == "copy_" else 0].untyped_storage().data_ptr()
        if not is_async or source not in {tensor.untyped_storage().data_ptr() for tensor in self._pinned}:
            self.counts.waits.append(f"{name} from memory that is not pinned")

    def _on_device(self, func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
        if on_host := [tensor.shape for tensor in tensors if not _is_there(tensor) and tensor.dim()]:
            raise MixedDevices(f"{func} of tensors on {GPU}, and of {on_host} on the host")
        if name in WAITING or (name in INDEXING and any(map(_is_mask, args[1]))):
            self._check_recordable(name)
            self.counts.waits.append(name)
        if name not in NO_KERNEL and "empty" not in name and not func.is_view:
            self.counts.kernels[name] += 1

    def _check_recordable(self, name: str) -> None:
        if self._is_recording:
            raise NotRecordable(f"{name} while work is recorded")


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among an operator's arguments, and in lists of them. torch's trees would take longer than the operators."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The same with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_mapped(change, each) for each in value) if isinstance(value, (list, tuple)) else value


def _is_there(value: Any) -> bool:
    return isinstance(value, SimulatedTensor)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _result_is_there(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
    if func.overloadpacket is torch.ops.aten.copy_:
        return _is_there(args[0])
    if (wanted := kwargs.get("device")) is not None:
        return torch.device(wanted).type == GPU.type
    return any(map(_is_there, tensors))


def _here(value: Any) -> Any:
    """The same with the data of simulated tensors, those in a dataclass included."""
    if dataclasses.is_dataclass(value):
        fields = {each.name: _here(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value.data_there if _is_there(value) else value


def _computed(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], is_there: bool) -> Any:
    """Compute on the CPU. A tensor that was changed in place stays the same object."""
    kwargs |= {key: value for key, value in {"device": HOST, "pin_memory": False}.items() if key in kwargs}
    found = func(*_mapped(_here, args), **{key: _mapped(_here, value) for key, value in kwargs.items()})
    known = {id(_here(tensor)): tensor for tensor in tensors}

    def as_known(tensor: Tensor) -> Tensor:
        if id(tensor) in known:
            return known[id(tensor)]
        return SimulatedTensor(tensor) if is_there else tensor

    return _mapped(as_known, found)
