"""The orchestrator on a virtual clock, between simulated engines: to break it, and to ask it questions of scale.

Everything here stands behind `core.ports`; what is simulated is the outside world, never the orchestrator.
"""
