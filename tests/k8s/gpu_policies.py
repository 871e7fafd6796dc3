"""Are engines on GPUs given what they use, and set as a GPU wants it?"""

from __future__ import annotations

from collections.abc import Iterator

from deploy.app import excess_rows
from deploy.defaults import GPU_BLOCK_TOKENS, GPU_CHUNK_TOKENS, GPU_STEP_TOKENS
from tests.k8s.manifests import (
    GPU,
    Objects,
    Pod,
    deployments,
    gibibytes,
    num_devices,
    ray_resources,
    replica_resources,
    settings,
    worker_pods,
)

SHARED_MEMORY = "/dev/shm"
RANK_GIB = 1.0
"""Shared memory of a rank; NCCL takes some hundred MiB."""


def gpus_are_asked_for_where_they_are_used(objects: Objects) -> Iterator[str]:
    by_role = {pod.role: pod for pod in worker_pods(objects)}
    for role, deployment in deployments(settings(objects)).items():
        pod, num_gpus = by_role[role], replica_resources(deployment)["GPU"]
        offered = ray_resources(pod)["GPU"]
        is_cuda = role != "orchestrator" and deployment.engine.device.startswith("cuda")
        if is_cuda != (num_gpus > 0) or num_gpus != offered:
            yield f"{role}: device, num_gpus ({num_gpus:g}) and the pod's {GPU} ({offered:g}) must agree"
        if num_devices(pod) != offered:
            yield f"{role}: Ray is told of {offered:g} GPUs, and the container gets {num_devices(pod):g}"
        if num_gpus and "cuda" not in pod.ray["image"]:
            yield f"{role}: {pod.ray['image']} is not the image with CUDA"
        if num_gpus and not pod.spec.get("nodeSelector"):
            yield f"{role}: a nodeSelector must say which GPU"
        tolerated = [toleration["key"] for toleration in pod.spec.get("tolerations", ())]
        if num_gpus and GPU not in tolerated:
            yield f"{role}: must tolerate the taint of GPU nodes"


def gpu_engines_compute_in_bfloat16(objects: Objects) -> Iterator[str]:
    for role, deployment in deployments(settings(objects)).items():
        if role != "orchestrator" and deployment.engine.device == "cuda" and deployment.engine.dtype != "bfloat16":
            yield f"{role}: dtype on a GPU is bfloat16, got {deployment.engine.dtype}"


def gpu_engines_run_as_on_a_gpu(objects: Objects) -> Iterator[str]:
    """The defaults are a CPU's: small blocks, and Python asks for each kernel."""
    for role, deployment in deployments(settings(objects)).items():
        if role == "orchestrator" or not deployment.engine.device.startswith("cuda"):
            continue
        if deployment.engine.block_tokens % GPU_BLOCK_TOKENS:
            got = deployment.engine.block_tokens
            yield f"{role}: block_tokens on a GPU is a multiple of {GPU_BLOCK_TOKENS}, got {got}"
        if not deployment.engine.compile and deployment.engine.tensor_parallel == 1:
            yield f"{role}: compile must be true, or no step is recorded as a CUDA graph"
        least = {"max_step_tokens": GPU_STEP_TOKENS, "prefill_chunk_tokens": GPU_CHUNK_TOKENS}
        for name, rows in least.items():
            if getattr(deployment.engine, name) < rows:
                yield f"{role}: {name} of a GPU is at least {rows}, got {getattr(deployment.engine, name)}"


def blocks_of_all_sessions_fit_into_a_pass(objects: Objects) -> Iterator[str]:
    """Or they are verified in several, one after the other, while drafting is priced by one."""
    if (problem := excess_rows(settings(objects))) is not None:
        yield problem


def ranks_have_shared_memory(objects: Objects) -> Iterator[str]:
    """NCCL's ranks meet there; a container has 64 MiB of it by itself, and what is used counts as its memory."""
    by_role = {pod.role: pod for pod in worker_pods(objects)}
    for role, deployment in deployments(settings(objects)).items():
        num_ranks = 1 if role == "orchestrator" else deployment.engine.tensor_parallel
        if num_ranks == 1:
            continue
        size, memory = _shared_gibibytes(by_role[role]), gibibytes(by_role[role].ray["resources"]["limits"]["memory"])
        if size < num_ranks * RANK_GIB:
            yield f"{role}: {num_ranks} ranks want {num_ranks * RANK_GIB:g} GiB at {SHARED_MEMORY}, got {size:g}"
        elif size > memory / 2:
            yield f"{role}: {size:g} GiB at {SHARED_MEMORY} leave too little of {memory:g} GiB"


def _shared_gibibytes(pod: Pod) -> float:
    volumes = {each["name"]: each.get("emptyDir", {}) for each in pod.spec["volumes"]}
    mounted = [volumes[each["name"]] for each in pod.ray["volumeMounts"] if each["mountPath"] == SHARED_MEMORY]
    return max((gibibytes(each["sizeLimit"]) for each in mounted if each.get("medium") == "Memory"), default=0.0)


CHECKS = (
    gpus_are_asked_for_where_they_are_used,
    gpu_engines_compute_in_bfloat16,
    gpu_engines_run_as_on_a_gpu,
    blocks_of_all_sessions_fit_into_a_pass,
    ranks_have_shared_memory,
)
