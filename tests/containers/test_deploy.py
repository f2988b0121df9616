"""What deploy/ holds, read by those that read it: compose, kubectl, systemd, Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from engine import ROOT

from fedopt_flwr import RunConfig

pytestmark = pytest.mark.containers
DEPLOY = ROOT / "deploy"
METRICS = set(re.findall(r"^\| `(fedopt_\w+)", (ROOT / "docs/operations.md").read_text(), re.M))
DASHBOARD = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())
SAFE = 2.0  # of 10; systemd calls up to 2 "safe"


def output_of(*command: object, **variables: str) -> str:
    """Return what a tool prints; it must succeed and complain of nothing."""
    if shutil.which(str(command[0])) is None:
        absent = f"not installed: {command[0]}"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(absent)
    environment = os.environ | variables
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "files",
    [["compose"], ["compose", "compose.gpu"], ["compose", "compose.monitoring"], ["compose.edge"]],
    ids="+".join,
)
def test_compose_files_are_read_and_hardened(files: list[str]) -> None:
    named = [part for name in files for part in ("-f", DEPLOY / f"{name}.yaml")]
    site = {"SERVER": "fl.example.org:8080", "CLIENT_ID": "3"}
    services = yaml.safe_load(output_of("docker-compose", *named, "config", **site))["services"]
    for name in {"server", "client"} & services.keys():
        service = services[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] in ("on-failure", "unless-stopped")
        assert "healthcheck" in service
        assert all(
            ":/run/secrets/" in v or v.startswith("/run/secrets/")
            for k, v in service["environment"].items()
            if k.endswith(("_CERTIFICATE", "_KEY", "_CA"))
        )


def merged(base: Any, patch: Any) -> Any:
    """As kubectl merges these: maps by key, lists of containers by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base.get(key), value) for key, value in patch.items()}
    if isinstance(base, list) and isinstance(patch, list):
        own = {entry["name"]: entry for entry in patch}
        return [merged(entry, own.get(entry["name"], {})) for entry in base]
    return patch


def manifests(overlay: str) -> list[dict[str, Any]]:
    folder = DEPLOY / "kubernetes" / "base"
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    found = [m for name in names for m in yaml.safe_load_all((folder / name).read_text())]
    if overlay == "gpu":
        patch = yaml.safe_load((DEPLOY / "kubernetes" / "gpu" / "client.yaml").read_text())
        del patch["metadata"]["namespace"]  # which kustomize adds to the base
        name = (patch["kind"], patch["metadata"]["name"])
        same = [m for m in found if (m["kind"], m["metadata"]["name"]) == name]
        assert len(same) == 1
        found[found.index(same[0])] = merged(same[0], patch)
    return found


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_manifests_keep_to_the_schemas_of_kubernetes_and_to_its_restricted_profile(
    overlay: str,
) -> None:
    found = manifests(overlay)
    RunConfig.from_file(DEPLOY / "kubernetes" / "base" / "federation.toml")
    assert {m["kind"] for m in found} == {
        "Namespace",
        "Service",
        "StatefulSet",
        "NetworkPolicy",
    }
    for manifest in found:
        kubernetes_validate.validate(manifest, "1.31", strict=True)
    for workload in (m for m in found if m["kind"] == "StatefulSet"):
        pod = workload["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"startupProbe", "livenessProbe", "readinessProbe", "resources"} <= container.keys()
        volumes = {v["name"] for v in pod["volumes"]}
        claimed = {c["metadata"]["name"] for c in workload["spec"]["volumeClaimTemplates"]}
        assert {m["name"] for m in container["volumeMounts"]} == volumes | claimed
        gpus = container["resources"]["limits"].get("nvidia.com/gpu")
        is_gpu_client = overlay == "gpu" and workload["metadata"]["name"] == "fedopt-client"
        assert gpus == (1 if is_gpu_client else None)


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_kubectl_makes_the_same_of_them(overlay: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None or '"v1.20' in output_of(kubectl, "version", "--client", "--output=json"):
        pytest.skip("no kubectl that reads kustomizations as of 2021 and later")
    text = output_of(kubectl, "kustomize", DEPLOY / "kubernetes" / overlay)
    built = {(m["kind"], m["metadata"]["name"]): m for m in yaml.safe_load_all(text)}
    for manifest in manifests(overlay):
        found = built.pop((manifest["kind"], manifest["metadata"]["name"]))
        assert found["metadata"].pop("namespace", "fedopt") == "fedopt"
        for volume in found.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", []):
            if "configMap" in volume:
                assert re.fullmatch("fedopt-config-[a-z0-9]+", volume["configMap"]["name"])
                volume["configMap"]["name"] = "fedopt-config"
        assert found == manifest
    ((kind, _), config) = built.popitem()
    assert (kind, built) == ("ConfigMap", {})
    RunConfig(**tomllib.loads(config["data"]["federation.toml"]))


def options(verb: str) -> set[str]:
    shown = output_of(sys.executable, "-m", "fedopt_flwr", verb, "--help", COLUMNS="200")
    return set(re.findall(r"env var: (FEDOPT_\w+)", shown))


def test_every_variable_that_deploy_sets_is_an_options() -> None:
    known = options("server") | options("client") | {"FEDOPT_DATA"}
    files = [p for p in DEPLOY.rglob("*") if p.suffix in (".yaml", ".service", ".env")]
    named = {n for p in files for n in re.findall(r"\bFEDOPT_[A-Z_]+[A-Z]\b", p.read_text())}
    assert len(named) >= 10
    assert named <= known | {"FEDOPT_SERVER_"}, named - known


@pytest.mark.parametrize("name", ["fedopt-server.service", "fedopt-client@.service"])
def test_units_are_read_and_hardened(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / name).read_text()
    unit = tmp_path / name
    unit.write_text(text.replace("/opt/fedopt/bin/fedopt", shutil.which("true") or ""))
    output_of("systemd-analyze", "verify", unit)
    shown = output_of("systemd-analyze", "security", "--offline=true", unit)
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", shown)
    assert float(exposure) <= SAFE


def test_prometheus_reads_its_file() -> None:
    assert "SUCCESS" in output_of(
        "promtool", "check", "config", DEPLOY / "monitoring/prometheus.yml"
    )


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    queries = [t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]]
    assert len(queries) > 12
    asked = {n for query in queries for n in re.findall(r"fedopt_\w+", query)}
    bare = {re.sub("_(sum|count|bucket)$", "", name) for name in asked}
    assert bare <= METRICS
    assert METRICS - bare == {"fedopt_info"}
    cells = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(cells)) == len(cells)
