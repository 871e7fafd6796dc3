"""The speculation tree of a session: the draft's half, which grows it, and the orchestrator's, which takes blocks.

Knows tokens, chances and the order of work; must not know models, KV or time.
"""
