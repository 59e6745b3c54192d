"""Manifests: valid, and consistent with the code and its pins."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import chz
import pytest
import yaml
from jsonschema import Draft202012Validator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.command import parse
from cluster.config.recipes import config_of

REPOSITORY = Path(__file__).parents[1]
DEPLOY = REPOSITORY / "deploy"
DOCUMENTS = [
    *sorted(DEPLOY.iterdir()), REPOSITORY / "docs/cluster.md",
    *sorted((REPOSITORY / "docs/cluster").glob("*.md")), REPOSITORY / "runtime-env.yaml",
]  # fmt: skip


def pins(name: str) -> dict[str, str]:
    """Versions by package."""
    lines = (REPOSITORY / name).read_text().splitlines()
    pinned = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pinned}


DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def _object(required: str = "", **properties: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of an object with exactly these properties."""
    return {
        "type": "object", "properties": properties, "required": required.split(),
        "additionalProperties": False,
    }  # fmt: skip


# Fields that the manifests use, with their types: as in the CRDs of KubeRay 1.5.1, 1.6.2 and 1.7.
_TEXT, _WHOLE, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_GROUP = {
    "rayStartParams": {"type": "object", "additionalProperties": _TEXT},
    "template": _object("spec", spec={"type": "object"}),
}
RAY_CLUSTER = _object(
    "headGroupSpec",
    rayVersion=_TEXT,
    authOptions=_object(mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling=_FLAG,
    autoscalerOptions=_object(version={"enum": ["v1", "v2"]}, idleTimeoutSeconds=_WHOLE),
    headGroupSpec=_object("template", serviceType=_TEXT, **_GROUP),
    workerGroupSpecs={
        "type": "array",
        "items": _object(
            "groupName maxReplicas minReplicas template",
            groupName=_TEXT, replicas=_WHOLE, minReplicas=_WHOLE, maxReplicas=_WHOLE, **_GROUP,
        ),
    },
)  # fmt: skip
RAY_JOB = _object(
    entrypoint=_TEXT, runtimeEnvYAML=_TEXT, shutdownAfterJobFinishes=_FLAG,
    ttlSecondsAfterFinished=_WHOLE, backoffLimit=_WHOLE, rayClusterSpec=RAY_CLUSTER,
)  # fmt: skip
PINS, CUDA_PINS = pins("constraints.txt"), pins("constraints-cuda.txt")


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text())


def cluster_spec(name: str) -> dict[str, Any]:
    spec = manifest(name)["spec"]
    return spec.get("rayClusterSpec", spec)


def written_environment() -> dict[str, str]:
    return yaml.safe_load((REPOSITORY / "runtime-env.yaml").read_text())["env_vars"]


def commands(text: str) -> list[list[str]]:
    """Arguments of every `cluster.train` in a text, over line ends; `...` stands for settings."""
    plain = re.sub(r"\\\n[# ]*", " ", text)
    found = re.findall(r"python -m cluster\.train ((?:[\w.]+=\S+\s+)+)", plain + "\n")
    return [shlex.split(arguments) for arguments in found]


def require_parses(arguments: list[str]) -> None:
    kind = config_of(arguments[0].removeprefix("recipe="))
    assert chz.is_chz(parse(kind, arguments[1:]))


def test_ray_up_accepts_its_cluster() -> None:
    config = prepare_config(manifest("ray-cluster.yaml"))
    validate_config(config)
    types = config["available_node_types"]
    assert types["gpu"]["max_workers"] == config["max_workers"]
    spot = "InstanceMarketOptions"
    assert spot in types["gpu"]["node_config"] and spot not in types["head"]["node_config"]


@pytest.mark.parametrize(
    ("name", "kind"), [("kuberay-cluster.yaml", "RayCluster"), ("kuberay-job.yaml", "RayJob")]
)
def test_kuberay_manifests_have_the_required_fields(name: str, kind: str) -> None:
    document = manifest(name)
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", kind)
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,46}", document["metadata"]["name"])
    spec = cluster_spec(name)
    assert spec["rayVersion"] == PINS["ray"]
    assert spec["enableInTreeAutoscaling"] and spec["authOptions"] == {"mode": "token"}
    (worker,) = spec["workerGroupSpecs"]
    assert 0 <= worker["minReplicas"] <= worker["replicas"] <= worker["maxReplicas"]
    for group in (spec["headGroupSpec"], worker):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        stop_s = int(written_environment()["RAY_JOB_STOP_WAIT_TIME_S"])
        (drain,) = (e for e in container["env"] if e["name"] == DRAIN)
        assert int(drain["value"]) < pod["terminationGracePeriodSeconds"] == stop_s
        assert container["image"] and pod["securityContext"]["runAsNonRoot"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        (shm,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
        memory = container["resources"]["limits"]["memory"], shm["sizeLimit"]
        limit, shared = (int(size.removesuffix("Gi")) for size in memory)
        assert 16 <= shared <= limit / 2, "Ray's object store, and the rest for processes"
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"


def test_kuberay_manifests_have_fields_of_its_schema() -> None:
    """Names and types as in KubeRay's CRDs; pod templates are left to Kubernetes."""
    Draft202012Validator({"properties": {"spec": RAY_CLUSTER}}).validate(
        manifest("kuberay-cluster.yaml")
    )
    Draft202012Validator({"properties": {"spec": RAY_JOB}}).validate(manifest("kuberay-job.yaml"))


def test_a_job_has_the_standing_clusters_cluster() -> None:
    assert cluster_spec("kuberay-job.yaml") == cluster_spec("kuberay-cluster.yaml")


def test_every_node_runs_one_image() -> None:
    images = set(re.findall(r"image: (\S+)", "".join(map(Path.read_text, DEPLOY.glob("*.yaml")))))
    assert len(images) == 1


def test_cuda_pins_equal_the_tested_versions() -> None:
    for package in ("ray", "chz", "transformers", "safetensors", "peft", "aiohttp"):
        assert CUDA_PINS[package] == PINS[package], package
    assert CUDA_PINS["sglang"] == pins("requirements/sglang-cpu.txt")["sglang"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["sglang"]]
    for requirement in map(Requirement, wanted):
        assert CUDA_PINS[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_extras_of_the_image_are_pinned() -> None:
    """The Dockerfile installs EXTRAS with these constraints."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for extra in ("wandb", "tensorboard", "mlflow", "data", "mcp", "textarena", "judge"):
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            assert PINS[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_commands_of_manifests_and_docs_parse() -> None:
    for name in ("ray-cluster.yaml", "kuberay-cluster.yaml"):
        (command,) = commands((DEPLOY / name).read_text())
        require_parses(command)
    require_parses(shlex.split(manifest("kuberay-job.yaml")["spec"]["entrypoint"])[3:])
    for command in commands((REPOSITORY / "docs/cluster.md").read_text()):
        require_parses(command)


def test_the_runtime_environment_gives_a_stopped_job_time() -> None:
    assert int(written_environment()["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    job = yaml.safe_load(manifest("kuberay-job.yaml")["spec"]["runtimeEnvYAML"])
    assert job["env_vars"].items() <= written_environment().items()


def test_manifests_require_a_token_and_contain_no_secret() -> None:
    up = manifest("ray-cluster.yaml")
    assert "-e RAY_AUTH_MODE=token" in up["docker"]["run_options"]
    assert "--dashboard-host=127.0.0.1" in " ".join(up["head_start_ray_commands"])
    assert "RAY_AUTH_MODE=token" in (DEPLOY / "Dockerfile").read_text()
    for path in DOCUMENTS:
        text = path.read_text()
        assert "RAY_AUTH_MODE=disabled" not in text, path
        # A long word of letters and digits mixed, or the forms of well-known keys.
        for word in re.findall(r"[A-Za-z0-9+/_-]{32,}", text):
            assert not (re.search(r"\d", word) and re.search(r"[A-Za-z]", word)), (path, word)
        assert not re.search(r"AKIA|BEGIN [A-Z ]*PRIVATE KEY|hf_[A-Za-z]{8}|sk-[A-Za-z]{8}", text)
