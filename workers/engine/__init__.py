"""The target engine and the draft engine: sessions, continuous batching, prefix sharing, and the engine thread."""

from workers.engine.base import Engine
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine
from workers.engine.thread import EngineLoop, Receiver

__all__ = ["DraftEngine", "Engine", "EngineLoop", "Receiver", "TargetEngine"]
