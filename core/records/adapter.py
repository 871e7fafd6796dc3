"""A LoRA adapter of a target, as requests, leases and engines name it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

ROOT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    """Name in the field `model` of requests."""
    path: str
    """Directory with PEFT's files, on each node that has a target."""
    digest: str = ""
    """Digest of the files, which identifies the weights: a name may be given to other weights later. Empty until a
    target has read them."""

    @property
    def root(self) -> bytes:
        """Key of the hashes of KV that was computed with these weights (`core.text.block_hashes`)."""
        return blake2b(self.digest.encode(), digest_size=ROOT_BYTES).digest()


def root_of(adapter: Adapter | None) -> bytes:
    """`Adapter.root`; empty for the model itself."""
    return b"" if adapter is None else adapter.root
