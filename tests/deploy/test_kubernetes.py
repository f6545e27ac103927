# SPDX-License-Identifier: Apache-2.0
"""deploy/kubernetes: objects of the right shape that find each other, and pods whose commands and probes work."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from moonpool.address import parse_address, parse_addresses
from moonpool.master import MasterSettings
from moonpool.master.store.etcd import EtcdOptions
from moonpool.node.settings import NodeSettings
from moonpool.node.slab import SlabPlace
from moonpool.store_client.settings import StoreClientSettings
from moonpool.units import parse_bytes

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
# Kind -> version, and the fields of its `spec` that there may be, with those that there have to be.
SHAPES: dict[str, tuple[str, set[str], set[str]]] = {
    "Namespace": ("v1", set(), set()),
    "Service": ("v1", {"clusterIP", "publishNotReadyAddresses"}, {"selector", "ports"}),
    "StatefulSet": ("apps/v1", {"replicas", "podManagementPolicy"}, {"serviceName", "selector", "template"}),
    "DaemonSet": ("apps/v1", {"updateStrategy", "minReadySeconds"}, {"selector", "template"}),
    "PodDisruptionBudget": ("policy/v1", {"maxUnavailable"}, {"selector"}),
    "NetworkPolicy": ("networking.k8s.io/v1", {"policyTypes", "ingress"}, {"podSelector"}),
}
POD_FIELDS = {
    "affinity", "automountServiceAccountToken", "containers", "dnsPolicy", "enableServiceLinks", "hostNetwork",
    "nodeSelector", "securityContext", "terminationGracePeriodSeconds", "volumes",
}  # fmt: skip
CONTAINER_FIELDS = {
    "args", "command", "env", "image", "lifecycle", "livenessProbe", "name", "ports", "readinessProbe", "resources",
    "securityContext", "startupProbe", "volumeMounts",
}  # fmt: skip
PROBE_FIELDS = {"exec", "failureThreshold", "httpGet", "periodSeconds", "timeoutSeconds"}
OWN_MASTERS = "moonpool-master-0.moonpool-master:7600,moonpool-master-1.moonpool-master:7600"


@cache
def objects() -> dict[str, Any]:
    """Return every object by kind: there is one of each."""
    names = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    found = [one for name in names for one in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def pod(kind: str) -> dict[str, Any]:
    template: dict[str, Any] = objects()[kind]["spec"]["template"]
    return template


def container(kind: str) -> dict[str, Any]:
    (one,) = pod(kind)["spec"]["containers"]
    found: dict[str, Any] = one
    return found


def environ(kind: str) -> dict[str, str]:
    """Return the variables of a container, with what Kubernetes knows of the pod made up."""
    known = {
        "metadata.name": "moonpool-master-0", "metadata.namespace": "moonpool", "spec.nodeName": "gpu-7",
        "status.hostIP": "10.0.0.7",
    }  # fmt: skip
    found: dict[str, str] = {}
    for one in container(kind)["env"]:
        value = one["value"] if "value" in one else known[one["valueFrom"]["fieldRef"]["fieldPath"]]
        found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], value)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str], str]:
    """Say a text with the folders of the container replaced by ones that are here, with what the pod has in them."""
    for name in ("config", "secret", "run"):
        (tmp_path / name).mkdir(exist_ok=True)

    def here(text: str) -> str:
        return text.replace("/etc/moonpool", str(tmp_path)).replace("/run/moonpool", str(tmp_path / "run"))

    (tmp_path / "secret" / "secret").write_text("s3cret\n", encoding="ascii")
    for name in ("master.toml", "node.toml"):
        text = here((FOLDER / name).read_text(encoding="utf-8"))
        (tmp_path / "config" / name).write_text(text, encoding="utf-8")
    return here


def test_shapes() -> None:
    found = objects()
    assert set(found) == set(SHAPES)
    for kind, (version, may, must) in SHAPES.items():
        assert found[kind]["apiVersion"] == version
        assert must <= set(found[kind].get("spec", {})) <= may | must, kind
    for kind in ("StatefulSet", "DaemonSet"):
        assert set(pod(kind)["spec"]) <= POD_FIELDS
        one = container(kind)
        assert set(one) <= CONTAINER_FIELDS
        for probe in (name for name in one if name.endswith("Probe")):
            assert set(one[probe]) <= PROBE_FIELDS
            assert len({"exec", "httpGet"} & set(one[probe])) == 1


def test_selectors_find_their_pods() -> None:
    found = objects()
    masters, nodes = (pod(kind)["metadata"]["labels"] for kind in ("StatefulSet", "DaemonSet"))
    assert masters != nodes
    assert found["Service"]["spec"]["selector"] == masters
    assert found["StatefulSet"]["spec"]["serviceName"] == found["Service"]["metadata"]["name"]
    assert found["DaemonSet"]["spec"]["selector"] == {"matchLabels": nodes}
    spread = pod("StatefulSet")["spec"]["affinity"]["podAntiAffinity"]
    (rule,) = spread["requiredDuringSchedulingIgnoredDuringExecution"]
    for selector in (
        found["StatefulSet"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"],
        found["NetworkPolicy"]["spec"]["podSelector"],
        rule["labelSelector"],
    ):
        assert selector == {"matchLabels": masters}


def test_volumes_and_ports_have_their_other_end() -> None:
    whole = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    made = {one["name"]: one["files"] for key in ("configMapGenerator", "secretGenerator") for one in whole[key]}
    for kind in ("StatefulSet", "DaemonSet"):
        volumes = {volume["name"]: volume for volume in pod(kind)["spec"]["volumes"]}
        assert {mount["name"] for mount in container(kind)["volumeMounts"]} == set(volumes)
        assert volumes["config"]["configMap"]["name"] in made
        assert volumes["secret"]["secret"]["secretName"] in made
        names = {port["name"] for port in container(kind)["ports"]}
        asked = {
            probe["httpGet"]["port"]
            for name, probe in container(kind).items()
            if name.endswith("Probe") and "httpGet" in probe
        }
        assert asked <= names
    ports = {port["name"]: port["containerPort"] for port in container("StatefulSet")["ports"]}
    assert {port["name"]: port["port"] for port in objects()["Service"]["spec"]["ports"]} == ports
    allowed = {port["port"] for rule in objects()["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]}
    assert allowed == set(ports)
    notes = pod("StatefulSet")["metadata"]["annotations"]
    assert int(notes["prometheus.io/port"]) == ports["pages"]


def test_containers_may_do_nothing_special() -> None:
    for kind in ("StatefulSet", "DaemonSet"):
        assert pod(kind)["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container(kind)["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip


def test_settings_of_a_master(parse: Callable[..., Any], place: Callable[[str], str]) -> None:
    name, given = parse([place(word) for word in container("StatefulSet")["args"]])
    assert (name, set(given)) == ("master", {"config"})
    settings = MasterSettings.load({}, file=given["config"], environ=environ("StatefulSet"))
    assert settings.secret == b"s3cret"
    # Nobody waits for one that cannot be reached by the name that it has.
    assert settings.advertise == "moonpool-master-0.moonpool-master.moonpool.svc:7600"
    ports = {port["name"]: port["containerPort"] for port in container("StatefulSet")["ports"]}
    assert (parse_address(settings.listen).port, parse_address(settings.http or "").port) == (
        ports["calls"], ports["pages"],
    )  # fmt: skip
    requested = container("StatefulSet")["resources"]["requests"]["memory"]
    assert settings.chunks_max * 200 < parse_bytes(f"{requested}B")
    client = StoreClientSettings.load({}, file=given["config"], environ=environ("StatefulSet"))
    assert (client.master, client.secret) == (OWN_MASTERS, b"s3cret")


def test_settings_of_a_master_that_are_commented_out_are_settings(place: Callable[[str], str], tmp_path: Path) -> None:
    text = place((FOLDER / "master.toml").read_text(encoding="utf-8"))
    full = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert full != text
    (tmp_path / "etcd").mkdir()
    (tmp_path / "etcd" / "password").write_text("etcd's\n", encoding="ascii")
    (tmp_path / "master.toml").write_text(full, encoding="utf-8")
    settings = MasterSettings.load({}, file=tmp_path / "master.toml", environ=environ("StatefulSet"))
    assert settings.etcd_password == b"etcd's"
    kind, _, where = settings.store.partition(":")
    options = EtcdOptions.parse(where, settings)
    assert (kind, len(options.endpoints)) == ("etcd", 3)
    assert options.ca is not None


def test_settings_of_a_node(
    parse: Callable[..., Any], words_of: Callable[[str], list[str]], place: Callable[[str], str]
) -> None:
    name, given = parse(words_of(place(container("DaemonSet")["command"][-1])))
    assert name == "node"
    settings = NodeSettings.load({}, file=given["config"], environ=environ("DaemonSet"))
    assert (settings.name, settings.host_id, settings.advertise) == ("gpu-7", "gpu-7", "10.0.0.7:7900")
    assert settings.secret == b"s3cret"
    assert settings.master == OWN_MASTERS
    assert len(parse_addresses(settings.master)) == objects()["StatefulSet"]["spec"]["replicas"]
    (port,) = container("DaemonSet")["ports"]
    assert parse_address(settings.listen).port == port["containerPort"]
    limits = container("DaemonSet")["resources"]["limits"]
    assert settings.dram + (512 << 20) <= parse_bytes(f"{limits['memory']}B")
    # Before it is stopped everything moves away, at the rate of the master.
    patience = pod("DaemonSet")["spec"]["terminationGracePeriodSeconds"]
    assert settings.dram / MasterSettings().drain_rate + 120 < patience


def test_a_disk_that_is_commented_out_would_be_there(tmp_path: Path) -> None:
    text = re.sub(r"^# (ssd = )", r"\1", (FOLDER / "node.toml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    (tmp_path / "secret").write_text("s3cret\n", encoding="ascii")
    (tmp_path / "node.toml").write_text(text.replace("/etc/moonpool/secret", str(tmp_path)), encoding="utf-8")
    settings = NodeSettings.load({}, file=tmp_path / "node.toml", environ=environ("DaemonSet"))
    assert settings.ssd is not None
    whole = re.sub(
        r"^( +)# ((?:- |  )(?:name|mountPath|hostPath|  path|  type)\b)", r"\1\2",
        (FOLDER / "nodes.yaml").read_text(encoding="utf-8"), flags=re.MULTILINE,
    )  # fmt: skip
    spec = yaml.safe_load(whole)["spec"]["template"]["spec"]
    assert "ssd" in {volume["name"] for volume in spec["volumes"] if "hostPath" in volume}
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert SlabPlace.parse(settings.ssd).path == Path(mounts["ssd"])


def test_kustomize_builds_it(tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    shutil.copytree(FOLDER, tmp_path / "kubernetes", ignore=shutil.ignore_patterns("secret"))
    (tmp_path / "kubernetes" / "secret").write_text("s3cret\n", encoding="ascii")
    done = subprocess.run([kubectl, "kustomize", tmp_path / "kubernetes"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}
    assert set(built) == {*SHAPES, "ConfigMap", "Secret"}
    assert {one["metadata"].get("namespace", "moonpool") for one in built.values()} == {"moonpool"}
    volumes = built["DaemonSet"]["spec"]["template"]["spec"]["volumes"]
    assert {"secret": {"secretName": built["Secret"]["metadata"]["name"], "defaultMode": 0o440}}.items() <= next(
        volume for volume in volumes if volume["name"] == "secret"
    ).items()
