"""One forward pass, planned: its rows, the KV blocks they read and write, and the way to the device."""

from workers.step.kv_cache import NUM_OWN_BLOCKS, KVCache, LayerShape, OutOfBlocks, SequenceKV
from workers.step.paged_plan import Form, parts_of
from workers.step.plan import Group, Span, StepPlan, Tiling, plan_step
from workers.step.rows import Step, StepRows, lay_out
from workers.step.transfer import Readback, upload

__all__ = [
    "NUM_OWN_BLOCKS",
    "Form",
    "Group",
    "KVCache",
    "LayerShape",
    "OutOfBlocks",
    "Readback",
    "SequenceKV",
    "Span",
    "Step",
    "StepPlan",
    "StepRows",
    "Tiling",
    "lay_out",
    "parts_of",
    "plan_step",
    "upload",
]
