"""Values that the parts exchange. All are frozen and picklable, and independent of the transport.

Grouped by audience: request and output (clients), engine (orchestrator and engines), trace, statistics, model.
"""

from core.records.adapter import Adapter, root_of
from core.records.engine import (
    UNSOUND,
    Base,
    Continuation,
    DraftReply,
    DraftRequest,
    DraftUpdate,
    Likeliest,
    Missing,
    Refused,
    SequenceSpec,
    Stamp,
    TargetRequest,
    Timing,
    TokenLogprobs,
    Verdict,
    VerifyReply,
    VerifyRequest,
    Want,
    is_last,
    is_sound,
)
from core.records.features import MAX_FEATURE_TOKENS, Features
from core.records.model import STATES_BESIDE_GUESSES, Findings, ModelInfo, max_guesses
from core.records.output import Chunk, FinishReason, Usage
from core.records.receipt import Receipt
from core.records.request import (
    PRIORITY,
    BeamSearch,
    EarlyStopping,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Policy,
    Quota,
    SpeculationFields,
)
from core.records.sampling import BIAS, GIVEN_SAMPLING, MODEL_SAMPLING, Sampling, SamplingFields
from core.records.statistics import EngineStats, SourceStats, SpeculationStats
from core.records.trace import Call, CallTrace, VerifiedBlock
from core.rules import Verification
