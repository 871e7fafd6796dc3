"""A model that several processes share: leader, followers, and how they notice a death."""

from workers.parallel.leader import Rank, follow, load_runtime, log_loss

__all__ = ["Rank", "follow", "load_runtime", "log_loss"]
