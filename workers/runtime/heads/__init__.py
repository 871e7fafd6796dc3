"""Runtimes of heads, in place of a model's: `HeadRuntime` for those that read one state, `KVHeadRuntime` for EAGLE's
and MTP's, which have KV."""

from workers.runtime.heads.head_runtime import HeadRuntime, load_head_runtime
from workers.runtime.heads.kv_head_runtime import KVHeadRuntime
from workers.runtime.heads.layer_fit import report_layers

__all__ = ["HeadRuntime", "KVHeadRuntime", "load_head_runtime", "report_layers"]
