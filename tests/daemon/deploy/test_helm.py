"""The chart, rendered by Helm itself: what its values become, and which it refuses."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kubernetes_objects import RefusedValues, render, validate

from tiercache.config.daemon_config import DaemonConfig, load_config
from tiercache.daemon.processes import beside_arena
from tiercache.daemon.tiers.forms.cipher import load_cipher
from tiercache.protocol.curve import load_allowed, load_server, make_client, make_server

CHART = Path(__file__).parents[3] / "daemon" / "deploy" / "helm" / "tiercache"
GIB = 1 << 30
SECRET_URL = "valkey://:open-sesame@kv:6379"
"""What a Secret holds."""
SHARED = {"shared": {"enabled": True, "existingSecret": "shared-kv"}}


def folder(query: str = "") -> dict[str, Any]:
    """Values for a shared folder."""
    return {"shared": {"enabled": True, "url": f"file:///kv{query}", "plain": True}}


def daemon_set(values: dict[str, Any]) -> dict[str, Any]:
    """The specification of the pods."""
    [found] = [one for one in validate(render(CHART, values)) if one["kind"] == "DaemonSet"]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def container(values: dict[str, Any]) -> dict[str, Any]:
    [found] = daemon_set(values)["containers"]
    return dict(found)


def config_of(values: dict[str, Any]) -> DaemonConfig:
    """The configuration that the daemon in the pod reads from its environment."""
    env = {one["name"]: one.get("value", SECRET_URL) for one in container(values)["env"]}
    return load_config(None, env)


def memory_bytes(values: dict[str, Any]) -> int:
    resources = container(values)["resources"]
    text = str(resources["limits"]["memory"])
    assert resources["requests"]["memory"] == text, "it is never overcommitted"
    return int(text[:-2]) << {"Mi": 20, "Gi": 30}[text[-2:]]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"http": {"enabled": False}, "nvme": {"type": "emptyDir"}, "podAnnotations": {"a": "b"}},
        {"nvme": {"enabled": False}, "settings": {"lock_memory": "require"}},
        {"nvme": {"paths": ["/mnt/a", "/mnt/b"]}, "podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}},
        SHARED,
        {"shared": {"enabled": True, "url": "s3://kv/prefix", "plain": True}},
        {
            "grafanaDashboard": {"enabled": True, "labels": {"team": "serving"}},
            "imagePullSecrets": [{"name": "s"}],
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraVolumes": [{"name": "v", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
        },
    ],
    ids=str,
)
def test_it_renders_to_what_kubernetes_takes(values: dict[str, Any]) -> None:
    assert config_of(values).arena_bytes == 32 * GIB


def test_settings_come_out_as_they_were_meant() -> None:
    # As Helm reads YAML: `no` and `off` are false, and whole numbers are floats.
    values = {
        "user": 1_000_650_000.0,
        "group": 1_000_650_000.0,
        "socketGroup": 2_000_000_000.0,
        "arena": 34359738368.0,
        "settings": {
            "what_if": False,
            "lock_memory": False,
            "kv_events_allow_remote": "yes",
            "record_max": 5_000_000_000.0,
            "pin_share": 0.25,
            "max_sessions": 512.0,
            "quota": {"team-a": "16GiB", "*": 1_000_000_000.0},
            "nvme_quota": "team-a=1TiB",
        },
    }
    spec, config = daemon_set(values), config_of(values)
    assert spec["containers"][0]["securityContext"]["runAsUser"] == 1_000_650_000
    assert "--owner=1000650000" in spec["initContainers"][0]["command"]
    assert spec["securityContext"]["supplementalGroups"] == [2_000_000_000]
    assert (config.group, config.arena_bytes) == ("2000000000", 32 * GIB)
    assert (config.what_if, config.lock_memory, config.kv_events_allow_remote) == (False, "off", True)
    assert (config.record_max_bytes, config.pin_share, config.max_sessions) == (5_000_000_000, 0.25, 512)
    assert dict(config.quota) == {"team-a": 16 * GIB, "*": 1_000_000_000}
    assert config.nvme_quota == (("team-a", 1 << 40),)


@pytest.mark.parametrize(
    ("arena", "grace"), [("64GiB", "50s"), ("1.5TiB", "0.5min"), ("64gb", 30.0), (68719476736.0, "900ms")]
)
def test_memory_and_grace_follow_from_the_settings(arena: str | float, grace: str | float) -> None:
    values = {"arena": arena, "grace": grace}
    config = config_of(values)
    assert config.arena_bytes + (256 << 20) <= memory_bytes(values) <= config.arena_bytes * 1.05 + (1 << 30)
    assert config.grace_s < daemon_set(values)["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    "values",
    [{}, {"http": {"enabled": False}}, folder(), {**folder("?connections=64"), "settings": {"nvme_workers": "on"}}],
    ids=str,
)
def test_the_chart_gives_what_the_daemon_needs_and_accepts_no_less(values: dict[str, Any]) -> None:
    config = config_of(values)
    least = config.arena_bytes + beside_arena(config).total_bytes(config.arena_bytes)
    assert memory_bytes(values) >= least
    assert memory_bytes({**values, "arenaMemoryLimit": f"{least >> 20}Mi"}) == least
    with pytest.raises(RefusedValues, match=f"give {least >> 20}Mi at least"):
        render(CHART, {**values, "arenaMemoryLimit": f"{(least >> 20) - 1}Mi"})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"arena": "32 gigabytes"}, "arena"),
        ({"nvme": {"type": "disk"}}, "type"),
        ({"unknown": 1}, "unknown"),
        ({"arenaMemoryLimit": "32895Mi"}, "32895Mi is too little for an arena of 32GiB.* give 32896Mi at least"),
        ({"memoryOverhead": "127Mi"}, "memoryOverhead 127Mi is too little: .* give 128Mi at least"),
        ({"settings": {"polcy": "lru"}}, "polcy"),
        ({"settings": {"policy": "arc"}}, "hazard"),
        ({"settings": {"arena": "1GiB"}}, "arena"),
        ({"settings": {"what_if": "maybe"}}, "what_if"),
        ({"settings": {"max_sessions": 0}}, "max_sessions"),
        ({"settings": {"slow_request": "soon"}}, "slow_request"),
        ({"listen": {"enabled": True}}, "listen.serverKeySecret"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"shared": {"enabled": True}}, "shared.enabled needs the URL of a store"),
        ({"shared": {"enabled": True, "url": "valkey://kv"}}, "needs the key that encrypts blocks"),
        ({"shared": {"enabled": True, "url": "valkey://:pw@kv", "plain": True}}, "put it into the Secret"),
        ({"shared": {"url": "kv:6379"}}, "url"),
        ({"shared": {"lookupTimeout": "soon"}}, "lookupTimeout"),
        ({"settings": {"shared": "valkey://kv"}}, "shared"),
        ({"grace": "1min"}, "terminationGracePeriodSeconds 60 is too short for grace 1min"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedValues, match=words):
        render(CHART, values)


def test_keys_are_handed_over_as_the_daemon_wants_them(tmp_path: Path) -> None:
    values = {
        "nvme": {"keySecret": {"name": "disk-key"}},
        "listen": {"enabled": True, "serverKeySecret": "server", "clientKeysConfigMap": "clients", "hostPort": 7411.0},
    }
    spec, config = daemon_set(values), config_of(values)
    assert (config.listen, str(config.nvme_key), str(config.curve_keys)) == (
        "tcp://0.0.0.0:7411",
        "/keys/nvme.key",
        "/keys/curve",
    )
    [its] = spec["containers"]
    assert {"name": "tiercache-tcp", "containerPort": 7411, "hostPort": 7411} in its["ports"]
    mounts = {one["mountPath"]: one for one in its["volumeMounts"]}
    assert mounts["/keys/curve/clients"]["readOnly"]
    volumes = {one["name"]: one for one in spec["volumes"]}
    assert set(volumes) >= {one["name"] for one in [*its["volumeMounts"], *spec["initContainers"][1]["volumeMounts"]]}
    assert volumes["tiercache-nvme-key"]["secret"]["secretName"] == "disk-key"
    # What the init container does, with the kubelet's modes, and then what the daemon does.
    made = tmp_path / "made"
    make_server(made)
    client = make_client(made, "team-a", tmp_path / "team-a.toml")
    for name in ("secrets/nvme", "secrets/server", "keys"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secrets/nvme/nvme.key").write_text(secrets.token_hex(32))
    shutil.copy(made / "server.toml", tmp_path / "secrets/server/server.toml")
    for path in (tmp_path / "secrets").rglob("*.*"):
        path.chmod(0o644)
    program, option, script = spec["initContainers"][1]["command"]
    script = script.replace("/keys", f"{tmp_path}/keys").replace("/secrets", f"{tmp_path}/secrets")
    subprocess.run([program, option, script], check=True, timeout=30)
    shutil.copytree(made / "clients", tmp_path / "keys/curve/clients", dirs_exist_ok=True)
    load_cipher(tmp_path / "keys/nvme.key")
    load_server(tmp_path / "keys/curve")
    allowed, problems = load_allowed(tmp_path / "keys/curve")
    assert (list(allowed.values()), problems, client.exists()) == (["team-a"], [], True)


def test_a_shared_store_is_reached_by_a_secret(tmp_path: Path) -> None:
    values = {"shared": {**SHARED["shared"], "lookupTimeout": "35ms", "deployment": "prod"}, "nvme": {"enabled": False}}
    spec, config = daemon_set(values), config_of(values)
    assert (config.shared.full, str(config.shared_key), config.shared_plain) == (SECRET_URL, "/keys/shared.key", False)
    assert (config.shared_lookup_timeout_s, config.shared_deployment) == (0.035, "prod")
    [its] = spec["containers"]
    [url] = [one for one in its["env"] if one["name"] == "TIERCACHE_SHARED"]
    assert url["valueFrom"] == {"secretKeyRef": {"name": "shared-kv", "key": "url"}}
    volumes = {one["name"]: one for one in spec["volumes"]}
    own, keys = spec["initContainers"]
    mounted = {one["name"] for each in (its, own, keys) for one in each["volumeMounts"]}
    assert mounted <= set(volumes)
    assert "/shared-state" in own["command"]
    assert str(config.shared_state) in {one["mountPath"] for one in its["volumeMounts"]}
    assert volumes["tiercache-shared-state"]["hostPath"]["path"] == "/var/lib/tiercache-shared"
    (tmp_path / "secrets/shared").mkdir(parents=True)
    (tmp_path / "keys").mkdir()
    (tmp_path / "secrets/shared/shared.key").write_text(secrets.token_hex(32))
    script = keys["command"][2].replace("/keys", f"{tmp_path}/keys").replace("/secrets", f"{tmp_path}/secrets")
    subprocess.run(["sh", "-euc", script], check=True, timeout=30)
    load_cipher(tmp_path / "keys/shared.key", "shared_key")
    plain = {"shared": {"enabled": True, "url": "valkey://kv:6379", "plain": True}}
    assert (config_of(plain).shared.full, config_of(plain).shared_plain) == ("valkey://kv:6379", True)
    assert len(daemon_set(plain)["initContainers"]) == 1, "there are no keys to copy"


ENGINES_CHART = """\
apiVersion: v1
kind: Pod
metadata: {name: engine}
spec:
  securityContext: {runAsUser: 10001}
  initContainers:
    - {{- include "tiercache.keys" .Subcharts.tiercache | nindent 6 }}
    - {{- include "tiercache.sidecar" .Subcharts.tiercache | nindent 6 }}
  containers:
    - name: engine
      image: vllm-tiercache
      volumeMounts: [{name: tiercache-run, mountPath: /run/tiercache}]
  volumes:
    {{- include "tiercache.sidecarVolumes" .Subcharts.tiercache | nindent 4 }}
"""


def test_a_sidecar_in_another_chart(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "charts").mkdir()
    shutil.copytree(CHART, tmp_path / "charts" / "tiercache")
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: engines\nversion: 1.0.0\n")
    (tmp_path / "templates" / "pod.yaml").write_text(ENGINES_CHART)
    own = {"daemonSet": {"enabled": False}, "arena": "8GiB", "nvme": {"type": "emptyDir", "keySecret": {"name": "k"}}}
    own |= SHARED
    [pod] = validate(render(tmp_path, {"tiercache": own}))
    keys, sidecar = pod["spec"]["initContainers"]
    assert (keys["name"], sidecar["name"], sidecar["restartPolicy"]) == ("tiercache-keys", "tiercache", "Always")
    config = load_config(None, {one["name"]: one.get("value", SECRET_URL) for one in sidecar["env"]})
    assert (str(config.shared_key), config.shared_state) == ("/keys/shared.key", None)
    assert (config.arena_bytes, str(config.run_dir), str(config.nvme_key)) == (
        8 * GIB,
        "/run/tiercache/daemon",
        "/keys/nvme.key",
    )
    mounted = {one["name"] for its in (keys, sidecar) for one in its["volumeMounts"]}
    assert mounted <= {one["name"] for one in pod["spec"]["volumes"]}
