"""The orchestrator on a virtual clock, between simulated engines: to break it, and to ask it questions of scale.

Everything here implements `core.ports`: the outside world is simulated, never the orchestrator.
"""
