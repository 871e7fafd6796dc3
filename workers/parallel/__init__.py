"""A model shared by several processes: leader, followers, and detection of a process's death."""

from workers.parallel.leader import Rank, load_runtime, log_rank_lost, run_follower

__all__ = ["Rank", "load_runtime", "log_rank_lost", "run_follower"]
