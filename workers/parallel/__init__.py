"""A model shared by several processes: leader, followers, and detection of a process's death."""

from workers.parallel.leader import Rank, follow, load_runtime, log_rank_lost

__all__ = ["Rank", "follow", "load_runtime", "log_rank_lost"]
