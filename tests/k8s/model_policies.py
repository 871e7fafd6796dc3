"""Checkpoints: where they are looked for, filled by commit, and never written to while they are served."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from typer import TyperException

from deploy.cli.planning.check import CheckOptions
from tests.deploy.cli.parsing import parsed
from tests.k8s.compositions import ROOT
from tests.k8s.manifests import Manifest, Objects, Pod, named, of_kind, pods, ray_pods, settings, worker_pods

IMAGE_ROOT = Path("/opt/outrider")
"""Where deploy/Dockerfile puts the repository."""
VOLUME = Path("/models")
FILLED = ("target", "draft")
"""Models that a job fills the volume with."""
COMMIT = re.compile(r"[0-9a-f]{40}")
TARGET_REVISION = "outrider.dev/target-revision"
"""Annotation of the head's pod: a change of it is a new cluster."""
KEPT_APART = ('--local-dir "$partial"', 'mv "$partial" "$place"')
"""How the jobs' command keeps a download apart from what is served; test_fill.py runs it."""


def models_are_where_settings_say(objects: Objects) -> Iterator[str]:
    """In the image, or on a volume that is mounted read-only; orchestrators read the target's tokenizer."""
    config = settings(objects)
    readers = [("orchestrator", config.target), ("target", config.target)]
    readers += [("draft", config.draft)] if config.draft else []
    by_role = {pod.role: pod for pod in worker_pods(objects)}
    for role, worker in readers:
        model = Path(worker.engine.model)
        if not _is_in_image(model) and not _is_on_volume(model, by_role[role]):
            yield f"{role}: there is nothing at {model}"


def revisions_are_commits(objects: Objects) -> Iterator[str]:
    """A branch moves: two pods of one name would serve two models."""
    for role in _filled(objects):
        revision = _models(objects)[f"{role.upper()}_REVISION"]
        if not COMMIT.fullmatch(revision):
            yield f"models.env: {role.upper()}_REVISION must be a commit of 40 digits, got {revision}"


def jobs_are_named_by_what_they_fill(objects: Objects) -> Iterator[str]:
    """Another commit needs another job, or `kubectl apply` would change nothing."""
    for role in _filled(objects):
        name = _jobs(objects)[role]["metadata"]["name"]
        if name != (wanted := f"fill-{role}-{_models(objects)[f'{role.upper()}_REVISION']}"):
            yield f"Job {name}: must be called {wanted}"


def what_is_served_is_what_is_filled(objects: Objects) -> Iterator[str]:
    """serve.yaml and models.env name one commit."""
    config = settings(objects)
    for role, worker in (("target", config.target), ("draft", config.draft)):
        if worker is not None and role in _filled(objects) and Path(worker.engine.model) != _place(objects, role):
            yield f"{role}: serves {worker.engine.model}, and {_place(objects, role)} is filled"


def what_is_served_is_not_written_to(objects: Objects) -> Iterator[str]:
    for pod in (pod for pod in pods(objects) if pod.is_job):
        if not all(words in pod.ray["command"][-1] for words in KEPT_APART):
            yield f"{pod.where}: must download to a folder apart, and rename it when it is complete"


def another_target_is_another_cluster(objects: Objects) -> Iterator[str]:
    """Streams that are resumed would otherwise go on with another model's tokens."""
    if not _filled(objects):
        return
    annotations = ray_pods(objects)[0].template["metadata"].get("annotations", {})
    if annotations.get(TARGET_REVISION) != _models(objects)["TARGET_REVISION"]:
        yield f"head: the annotation {TARGET_REVISION} must be the target's commit"


def downloads_are_checked_by_their_headers(objects: Objects) -> Iterator[str]:
    """Alone, and as the pair that is served, by a command that there is; the job's memory is for headers alone."""
    pair = [str(_place(objects, role)) for role in _filled(objects)]
    for pod in (pod for pod in pods(objects) if pod.is_job):
        checked = []
        for words in _commands(pod, _models(objects)):
            try:
                args = parsed(CheckOptions, words[1:])
            except TyperException:
                args = None
            if args is None or words[0] != "check":
                yield f"{pod.where}: there is no command outrider {' '.join(words)}"
                continue
            checked.append([str(each) for each in (args.target, args.draft) if each is not None])
            if not args.no_weights:
                yield f"{pod.where}: the check loads the weights; say --no-weights"
        if pair not in checked or len(checked) < 2:
            yield f"{pod.where}: checks {checked}; it must check what it downloaded, and {pair}"


def _commands(pod: Pod, models: Mapping[str, str]) -> Iterator[list[str]]:
    """Arguments of each `outrider` in the job's command, with the variables that it sets and those of models.env."""
    known = dict(models)
    for line in pod.ray["command"][-1].splitlines():
        words = [_expanded(word, known) for word in line.partition("#")[0].replace('"', "").split()]
        known.update(word.split("=", 1) for word in words if re.match(r"\w+=", word))
        if words[:1] == ["outrider"]:
            yield words[1:]


def _expanded(word: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda found: known.get(found[1], found[0]), word)


def _filled(objects: Objects) -> tuple[str, ...]:
    """Roles whose models jobs fill the volume with."""
    return tuple(role for role in FILLED if role in _jobs(objects))


def _jobs(objects: Objects) -> dict[str, Manifest]:
    return {job["metadata"]["labels"]["outrider.dev/model"]: job for job in of_kind(objects, "Job")}


def _models(objects: Objects) -> dict[str, str]:
    """models.env."""
    return dict(named(objects, "ConfigMap", "models")["data"])


def _place(objects: Objects, role: str) -> Path:
    models = _models(objects)
    return VOLUME / f"{models[f'{role.upper()}_MODEL']}@{models[f'{role.upper()}_REVISION']}"


def _is_in_image(model: Path) -> bool:
    if not model.is_relative_to(IMAGE_ROOT):
        return False
    return (ROOT / model.relative_to(IMAGE_ROOT) / "config.json").is_file()


def _is_on_volume(model: Path, pod: Pod) -> bool:
    mounts = pod.ray.get("volumeMounts", ())
    return any(model.is_relative_to(mount["mountPath"]) and mount.get("readOnly") is True for mount in mounts)


CHECKS = (
    models_are_where_settings_say,
    revisions_are_commits,
    jobs_are_named_by_what_they_fill,
    what_is_served_is_what_is_filled,
    what_is_served_is_not_written_to,
    another_target_is_another_cluster,
    downloads_are_checked_by_their_headers,
)
