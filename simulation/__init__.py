"""The real orchestrator on a virtual clock between simulated engines, for chaos tests and questions of scale.

Everything here implements `core.ports`. Only the outside world is simulated.
"""
