"""Settings: frozen, typed, checked once at the edge (`deploy.settings`) and handed down.

Each class refuses unknown fields when `deploy.settings` reads it from a file, and out-of-range values wherever it is
made.
"""

from core.config.engine import (
    DECODE_TOKENS,
    DTYPES_ALLOWED,
    FP8_CAPABILITY,
    MIN_CHUNK_TOKENS,
    Dtype,
    EngineConfig,
    KVDtype,
)
from core.config.http import AUTO, NONE, HttpConfig
from core.config.limits import Limits
from core.config.link import LINK_PORTS, LinkTls
from core.config.scaling import Autoscaling, DraftScaling, OrchestratorScaling, TargetScaling
from core.config.service import (
    DraftConfig,
    FleetConfig,
    OrchestratorConfig,
    ServiceConfig,
    TargetConfig,
    WorkerConfig,
)
from core.config.speculation import SpeculationConfig
from core.config.tiers import ServiceTiers
from core.config.tracing import TracingConfig
