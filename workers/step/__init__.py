"""Plan of one forward pass: its rows, the KV blocks they read and write, and the copies to and from the device."""

from workers.step.kv_cache import NUM_OWN_BLOCKS, KVCache, LayerShape, OutOfBlocks, SequenceKV
from workers.step.paged_plan import StepShape
from workers.step.plan import NO_TILING, AttentionGroup, Reads, StepPlan, Tiling, plan_step
from workers.step.readers import Span
from workers.step.rows import Step, StepRows, flatten
from workers.step.states import INITIAL, StateRows
from workers.step.transfer import Readback, Uploads, upload

__all__ = [
    "INITIAL",
    "NO_TILING",
    "NUM_OWN_BLOCKS",
    "AttentionGroup",
    "KVCache",
    "LayerShape",
    "OutOfBlocks",
    "Readback",
    "Reads",
    "SequenceKV",
    "Span",
    "StateRows",
    "Step",
    "StepPlan",
    "StepRows",
    "StepShape",
    "Tiling",
    "Uploads",
    "flatten",
    "plan_step",
    "upload",
]
