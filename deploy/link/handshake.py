"""The handshake of a link: each end proves that it knows the key.

    engine         Challenge  version, nonce
    orchestrator   Hello      version, epoch, nonce, HMAC(key, "orchestrator" + both nonces)
    engine         Welcome    HMAC(key, "engine" + both nonces)

The key itself is never sent, proofs are compared in constant time, and a recorded handshake cannot be replayed. The
handshake does not encrypt or sign later messages: that takes TLS (`tls`) or a private network. Pure functions.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from deploy.link.address import LinkAddress
from deploy.link.stream import LinkError
from protos.outrider.link.v1 import link_pb2 as pb

VERSION = 10
KEY_BYTES = NONCE_BYTES = 32
MAX_HANDSHAKE_BYTES = 256
"""Largest frame, in bytes, until the handshake is complete."""
HANDSHAKE_TIMEOUT_S = 5.0


def challenge() -> pb.Challenge:
    return pb.Challenge(version=VERSION, nonce=secrets.token_bytes(NONCE_BYTES))


def answer(challenge: pb.Challenge, address: LinkAddress) -> pb.Hello:
    """The orchestrator's answer to a challenge. Raises: LinkError if the protocol versions differ."""
    _check_version(challenge.version)
    nonce = secrets.token_bytes(NONCE_BYTES)
    proof = _proof(address.key, b"orchestrator", challenge.nonce, nonce)
    return pb.Hello(version=VERSION, epoch=address.epoch, nonce=nonce, proof=proof)


def admit(hello: pb.Hello, challenge: pb.Challenge, epoch: int, key: bytes) -> pb.Welcome:
    """The engine's answer to a valid hello. Raises: LinkError if version, proof or epoch is wrong."""
    _check_version(hello.version)
    if not hmac.compare_digest(hello.proof, _proof(key, b"orchestrator", challenge.nonce, hello.nonce)):
        raise LinkError("the orchestrator's key is not this engine's")
    if hello.epoch != epoch:
        raise LinkError(f"the orchestrator wants engine {hello.epoch:016x}, but this is {epoch:016x}")
    return pb.Welcome(proof=_proof(key, b"engine", challenge.nonce, hello.nonce))


def check_welcome(welcome: pb.Welcome, challenge: pb.Challenge, hello: pb.Hello, address: LinkAddress) -> None:
    """Check the engine's proof. Raises: LinkError if the engine does not know the key."""
    if not hmac.compare_digest(welcome.proof, _proof(address.key, b"engine", challenge.nonce, hello.nonce)):
        raise LinkError("the process at this address does not know the engine's key")


def _check_version(version: int) -> None:
    if version != VERSION:
        raise LinkError(
            f"the other end speaks version {version} of the protocol, this end {VERSION}: update the older one"
        )


def _proof(key: bytes, side: bytes, engine_nonce: bytes, orchestrator_nonce: bytes) -> bytes:
    if len(engine_nonce) != NONCE_BYTES or len(orchestrator_nonce) != NONCE_BYTES:
        raise LinkError(f"a nonce without {NONCE_BYTES} bytes")
    return hmac.digest(key, side + engine_nonce + orchestrator_nonce, hashlib.sha256)
