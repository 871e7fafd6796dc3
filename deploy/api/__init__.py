"""Code shared by the gRPC and HTTP APIs: authentication, models, checks of values, admission."""

from deploy.api.authentication import Authenticator, Caller, KeyLimits, new_key, tokens_path
from deploy.api.checks import check_length, check_tools, json_object, require, token_ids
from deploy.api.given import SERVICE_TIERS, Given, GivenBeams, GivenTool, ServiceTier, given_sampling, template_call
from deploy.api.hosted import AdapterStore, Hosted, Models, Served, Watch, load_of
from deploy.api.offload import LONG_BYTES, Offload
from deploy.api.proxy.admission import RETRY_S, Places, ProxyAdmission
from deploy.api.proxy.places import admission_behind
from deploy.api.replies import message_of, shortened, speculation_fields
from deploy.api.request import sampling_defaults
from deploy.api.samples import (
    Samples,
    SamplesUsage,
    completed,
    completed_prompts,
    merged,
    receipt_maker,
    sample_seed,
    streamed,
    to_requests,
)
from deploy.api.source import beginning

__all__ = [
    "LONG_BYTES",
    "RETRY_S",
    "SERVICE_TIERS",
    "AdapterStore",
    "Authenticator",
    "Caller",
    "Given",
    "GivenBeams",
    "GivenTool",
    "Hosted",
    "KeyLimits",
    "Models",
    "Offload",
    "Places",
    "ProxyAdmission",
    "Samples",
    "SamplesUsage",
    "Served",
    "ServiceTier",
    "Watch",
    "admission_behind",
    "beginning",
    "check_length",
    "check_tools",
    "completed",
    "completed_prompts",
    "given_sampling",
    "json_object",
    "load_of",
    "merged",
    "message_of",
    "new_key",
    "receipt_maker",
    "require",
    "sample_seed",
    "sampling_defaults",
    "shortened",
    "speculation_fields",
    "streamed",
    "template_call",
    "to_requests",
    "token_ids",
    "tokens_path",
]
