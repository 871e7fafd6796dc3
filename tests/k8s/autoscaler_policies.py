"""Ray's autoscaler: it is on, is started again when it ends, and asks for no pod too many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.schema import AutoscalerInstance
from ray.core.generated.autoscaler_pb2 import GangResourceRequest, ResourceRequest
from ray.core.generated.common_pb2 import LabelSelectorOperator
from ray.core.generated.instance_manager_pb2 import Instance, NodeKind

from deploy.engines import bundles
from tests.k8s.manifests import Objects, cluster, deployments, least_replicas, settings, worker_pods

AUTOSCALER_COMMAND = "KUBERAY_GEN_AUTOSCALER_START_CMD"
"""Variable in which KubeRay hands its command to the autoscaler's container."""
HEAD = "headgroup"
"""As Ray calls the head's group."""


def pods_follow_replicas(objects: Objects) -> Iterator[str]:
    options = cluster(objects).get("autoscalerOptions", {})
    if not cluster(objects).get("enableInTreeAutoscaling") or options.get("version") != "v2":
        yield "RayCluster: the in-tree autoscaler v2 must be on"


def the_autoscaler_is_started_again(objects: Objects) -> Iterator[str]:
    """In its container: pods of the autoscaler v2 are never restarted. test_autoscaler.py runs the command."""
    args = " ".join(cluster(objects).get("autoscalerOptions", {}).get("args", ()))
    if not args.strip() or "while true" not in args or AUTOSCALER_COMMAND not in args:
        yield f"autoscalerOptions: args must start ${AUTOSCALER_COMMAND} again whenever it ends"


def pods_at_start_hold_the_first_replicas(objects: Objects) -> Iterator[str]:
    """At install the placement groups of engines wait while their pods start: no other pod may be asked for.

    Asks Ray's own scheduler, whose arithmetic is that of floats: what a pod has exactly may not fit.
    """
    ray_cluster = {"metadata": {"name": "outrider", "namespace": "outrider"}, "spec": cluster(objects)}
    config = AutoscalingConfig(_derive_autoscaling_config_from_ray_cr(ray_cluster), skip_content_hash=True)
    starting = [_starting(HEAD, 0), *(_starting(*each) for each in _first_pods(objects))]
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_nodes(),
            resource_requests=[],
            gang_resource_requests=list(_waiting(objects)),
            current_instances=starting,
            disable_launch_config_check=True,
        )
    )
    for launch in reply.to_launch:
        yield f"{launch.instance_type}: at install the autoscaler would start {launch.count} pods beside the first ones"


def _first_pods(objects: Objects) -> Iterator[tuple[str, int]]:
    for pod in worker_pods(objects):
        yield from ((pod.role, number) for number in range((pod.group or {})["replicas"]))


def _starting(group: str, number: int) -> AutoscalerInstance:
    kind = NodeKind.HEAD if group == HEAD else NodeKind.WORKER
    instance = Instance(instance_id=f"{group}-{number}", instance_type=group, status=Instance.ALLOCATED, node_kind=kind)
    return AutoscalerInstance(im_instance=instance)


def _waiting(objects: Objects) -> Iterator[GangResourceRequest]:
    """The placement groups of the first engines, as Ray's GCS reports them."""
    for role, deployment in deployments(settings(objects)).items():
        if role != "orchestrator":
            for _ in range(least_replicas(deployment)):
                requests = [_request(bundle, deployment.labels) for bundle in bundles(deployment)]
                yield GangResourceRequest(bundle_selectors=[{"resource_requests": requests}])


def _request(bundle: Mapping[str, float], labels: Mapping[str, str]) -> ResourceRequest:
    request = ResourceRequest(resources_bundle=bundle)
    selector = request.label_selectors.add()
    for key, value in labels.items():
        selector.label_constraints.add(
            label_key=key, operator=LabelSelectorOperator.LABEL_OPERATOR_IN, label_values=[value]
        )
    return request


CHECKS = (
    pods_follow_replicas,
    the_autoscaler_is_started_again,
    pods_at_start_hold_the_first_replicas,
)
