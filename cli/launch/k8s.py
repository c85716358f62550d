"""`dtrain launch --to k8s`: an Indexed Job with the service by which its pods find node 0, and the spec in a ConfigMap.

The sources of what it rests on: "Jobs" (Indexed completion mode, Pod failure policy), "Volumes" (emptyDir with medium
Memory) and "DNS for Services and Pods" in the documentation of Kubernetes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from ...specs.codes import Code
from ..terminal.refusal import Refused
from ..token import TOKEN_VARIABLE
from .job import PORT, Job, quoted

SPEC_FOLDER, SPEC_FILE = "/etc/dtrain", "spec.yaml"
HOME = "/dtrain"
"""Where the claim is mounted if nothing else is said, and the working folder: relative paths are below it."""
RETRIES_PER_NODE = 3
_MIB = 2**20


def manifest(job: Job) -> str:
    """The YAML, for kubectl apply."""
    if job.wanted.image is None:
        raise Refused(Code.USAGE, "--to k8s needs --image IMAGE: the container image of the pods, with dtrain in it")
    if job.spec.disk_tier is not None and job.wanted.claim is None:
        raise Refused(
            Code.USAGE,
            "--claim NAME[:PATH]: a PersistentVolumeClaim for output_dir"
            f"{' (ReadWriteMany, for several nodes)' if job.nodes > 1 else ''}; without one the disk tier would be "
            "lost with its pod",
        )
    documents = [_config_map(job), _service(job), _job(job)]
    return _head(job) + "---\n".join(yaml.dump(one, Dumper=_Dumper, sort_keys=False) for one in documents)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they were written."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _head(job: Job) -> str:
    lines = [
        f"{job.spec.name} on {job.nodes} nodes of Kubernetes; start it with: kubectl apply -f THIS_FILE",
        "Exit code 75 (evicted, its newest step stored) and disruptions do not count against backoffLimit.",
        "Pods that do not share the folder need one token:",
        f"  kubectl create secret generic {job.name}-token --from-literal=token=$(openssl rand -hex 32)",
    ]
    if job.gpu_words:
        lines.append(job.gpu_words)
    if job.shm_bytes is None:
        lines.append("How large the snapshots are is not known for this model: /dev/shm has no limit of its own.")
    return "".join(f"# {line}\n" for line in lines)


def _meta(job: Job, suffix: str = "") -> dict[str, Any]:
    return {"name": job.name + suffix, "labels": {"app": job.name}}


def _config_map(job: Job) -> dict[str, Any]:
    text = job.spec_path.read_text()
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(job, "-spec"), "data": {SPEC_FILE: text}}


def _service(job: Job) -> dict[str, Any]:
    """Headless, and it names pods before they are ready: the others look for node 0 while it starts."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": job.name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(job), "spec": spec}


def _job(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(job),
        "spec": {
            "completions": job.nodes,
            "parallelism": job.nodes,
            "completionMode": "Indexed",
            "backoffLimit": RETRIES_PER_NODE * job.nodes,
            "podFailurePolicy": {
                "rules": [
                    _on_code("Ignore", Code.PREEMPTED),
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    _on_code("FailJob", Code.USAGE, Code.DAMAGED, Code.FAILED, Code.BAD_SPEC),
                ]
            },
            "template": {"metadata": {"labels": {"app": job.name}}, "spec": _pod(job)},
        },
    }


def _on_code(action: str, *codes: Code) -> dict[str, Any]:
    values = sorted(int(code) for code in codes)
    return {"action": action, "onExitCodes": {"containerName": "dtrain", "operator": "In", "values": values}}


def _pod(job: Job) -> dict[str, Any]:
    claim, _, path = (job.wanted.claim or "").partition(":")
    volumes: list[Mapping[str, Any]] = [
        {"name": "spec", "configMap": {"name": f"{job.name}-spec"}},
        {"name": "snapshots", "emptyDir": _memory(job.shm_bytes)},
    ]
    mounts = [
        {"name": "spec", "mountPath": SPEC_FOLDER, "readOnly": True},
        {"name": "snapshots", "mountPath": "/dev/shm"},
    ]
    if claim:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "runs", "mountPath": path or HOME})
    container: dict[str, Any] = {
        "name": "dtrain",
        "image": job.wanted.image,
        "command": ["sh", "-c", _start(job)],
        "workingDir": path or HOME,
        "env": [_token(job)],
        "volumeMounts": mounts,
    }
    if job.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    return {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.stop_s,
        "containers": [container],
        "volumes": volumes,
    }


def _start(job: Job) -> str:
    """Pod 0's name is known a moment after it starts; the rank is JOB_COMPLETION_INDEX."""
    host = f"{job.name}-0.{job.name}"
    command = quoted(job.command(f"{SPEC_FOLDER}/{SPEC_FILE}", "dtrain"))
    if job.nodes == 1:
        return f"exec {command} --nodes 1"
    count = job.spec.cluster.nodes.to_spec()
    place = f"--nodes {count} --rendezvous {shlex.quote(f'{host}:{job.wanted.port or PORT}')}"
    return f"until getent hosts {host} > /dev/null; do sleep 1; done\nexec {command} {place}\n"


def _token(job: Job) -> dict[str, Any]:
    reference = {"name": f"{job.name}-token", "key": "token", "optional": True}
    return {"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": reference}}


def _memory(shm_bytes: int | None) -> dict[str, Any]:
    limit = {"sizeLimit": f"{-(-shm_bytes // _MIB)}Mi"} if shm_bytes is not None else {}
    return {"medium": "Memory", **limit}
