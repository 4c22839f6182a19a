"""Deployment files: they name what exists, validators take them, and of the chart Helm makes what the daemon reads."""

from __future__ import annotations

import ast
import json
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tiercache import __version__
from tiercache.config.daemon_config import DaemonConfig, load_config
from tiercache.config.settings import SETTINGS
from tiercache.daemon.processes import beside_arena
from tiercache.daemon.tiers.forms.cipher import load_cipher
from tiercache.protocol.curve import load_allowed, load_server, make_client, make_server


class RefusedValues(Exception):
    """Helm rejected the values, the schema or the templates."""


def objects_of(text: str) -> list[dict[str, Any]]:
    """The documents of a text, none of them empty."""
    yaml: Any = pytest.importorskip("yaml")
    return [document for document in yaml.safe_load_all(text) if document]


def validate(text: str) -> list[dict[str, Any]]:
    """The objects of a text, of which those of Kubernetes itself fit its schema."""
    validator: Any = pytest.importorskip("kubernetes_validate")
    objects = objects_of(text)
    known = [one for one in objects if not one["apiVersion"].startswith("monitoring.coreos.com")]
    for one in known:
        validator.validate(one, "1.30", strict=True)
    assert known
    return objects


def render(chart: Path, values: Mapping[str, Any]) -> str:
    """The chart's objects, by Helm's own engine as a library. Raises RefusedValues."""
    library: Any = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    try:
        with library.Chart.load(str(chart)) as loaded:
            rendered = loaded.render(dict(values), name="demo", namespace="prod")
    except library.HelmError as error:
        raise RefusedValues(str(error)) from error
    return "\n---\n".join(text for name, text in rendered.items() if name.endswith(".yaml"))


ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "daemon" / "deploy"
CHART = DEPLOY / "helm" / "tiercache"
RULE_TESTS = sorted(CHART.glob("alerts*_test.yaml"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
GUIDE = (ROOT / "daemon" / "OPERATING.md").read_text()
each_manifest = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)


def queries() -> list[str]:
    """The queries of the dashboard's panels."""
    panels = json.loads((CHART / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_metrics_in_rules_and_panels_exist() -> None:
    text = (ROOT / "daemon" / "MONITORING.md").read_text()  # another test holds its table to the code
    known = dict(re.findall(r"^\| `(tiercache_\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert len(known) > 50
    for text in ((CHART / "alerts.yaml").read_text(), " ".join(queries())):
        used = set(re.findall(r"\btiercache_[a-z0-9_]+", re.sub(r"\binstance:\w+:\w+", "", text)))
        assert used
        for name in used:
            base = re.sub(r"_(bucket|count|sum)$", "", name)
            assert name in known or known.get(base) == "histogram", name


def test_settings_in_manifests_and_chart_exist() -> None:
    texts = [path.read_text() for path in [*MANIFESTS, *CHART.rglob("*.tpl"), DEPLOY / "Dockerfile"]]
    named = {name for text in texts for name in re.findall(r"TIERCACHE_([A-Z_]+)(?:, value|=)", text)}
    assert {"ARENA", "NVME", "HTTP"} <= named
    assert {name.lower() for name in named} - {"config"} <= set(SETTINGS)


def test_all_is_of_this_release() -> None:
    text = (CHART / "Chart.yaml").read_text()
    assert f'appVersion: "{__version__}"' in text
    assert f"\nversion: {__version__}\n" in text
    for path in MANIFESTS:
        assert f"image: tiercache:{__version__}" in path.read_text(), path.name


@each_manifest
def test_memory_counts_the_arena(path: Path) -> None:
    documents = [one for one in objects_of(path.read_text()) if one["kind"] in ("Deployment", "DaemonSet")]
    specs = [one["spec"]["template"]["spec"] for one in documents]
    [(spec, container)] = [
        (spec, one)
        for spec in specs
        for one in [*spec.get("initContainers", []), *spec["containers"]]
        if one["name"] == "tiercache"
    ]
    env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    arena_gib = int(env["TIERCACHE_ARENA"].removesuffix("GiB"))
    assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) > arena_gib
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    for name, default in (("RUN_DIR", "/run/tiercache"), ("NVME", ""), ("SHARED_STATE", "")):
        place = env.get(f"TIERCACHE_{name}", default)
        if not place:
            continue
        [mount] = [mount for mount in mounts if place == mount or place.startswith(f"{mount}/")]
        # The kubelet makes them as root's, and open to all users: the daemon uses only a folder of its own.
        assert "emptyDir" not in mounts[mount] or place != mount, f"{name} is the emptyDir itself"


def test_the_image_takes_what_the_package_is_made_of() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    allowed = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = {word for words in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE) for word in words.split()}
    assert copied == allowed
    assert copied >= {"tiercache", "daemon", "connectors", "kernels", "pyproject.toml", "constraints.txt"}
    assert all((ROOT / name).exists() for name in copied)
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert stages[-1] == "daemon", "the image that is built without --target"
    assert "engine" in stages, "what makes vllm-tiercache"


# --- the guide ---------------------------------------------------------------------------------------


def test_every_rule_is_tested_and_explained() -> None:
    alerts = re.findall(r"- alert: (\w+)", (CHART / "alerts.yaml").read_text())
    tests = "".join(path.read_text() for path in RULE_TESTS)
    fired = set(re.findall(r"alertname: (\w+)\n +exp_alerts:\n", tests))
    assert set(alerts) - fired == set(), "each has a case in which it fires"
    assert [name for name in alerts if f"`{name}`" not in GUIDE] == [], "each has its remedy in OPERATING.md"


def logged_texts() -> set[str]:
    """The fixed texts of lines of level warning and above that the daemon and its HTTP process may log."""
    texts = set()
    for path in [*(ROOT / "daemon").rglob("*.py"), *(ROOT / "tiercache" / "http").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of, level = node.func.value, node.func.attr
                named = isinstance(of, ast.Name) and of.id in ("log", "logger")
                if named and level in ("warning", "error", "critical", "exception"):
                    texts |= {str(node.args[0].value)} if isinstance(node.args[0], ast.Constant) else set()
    return texts


def test_every_line_of_the_log_is_explained() -> None:
    texts = logged_texts()
    assert len(texts) > 25
    lines = {re.sub(r"(%[sdg]|%\.\d+f)+", "…", text) for text in texts} - {"…"}
    unknown = sorted(line for line in lines if f"`{line}`" not in GUIDE)
    assert unknown == [], "say in daemon/OPERATING.md, under 'Lines of the log', what to do about these"


# --- the real validators, where they are installed --------------------------------------------------


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a validator; the test is skipped where it is not installed."""
    if (found := shutil.which(program)) is None:
        pytest.skip(f"{program} is not installed")
    return subprocess.run([found, *arguments], capture_output=True, text=True, timeout=60, check=False)


@each_manifest
def test_manifests_fit_the_schema_of_kubernetes(path: Path) -> None:
    validate(path.read_text())


@pytest.mark.stress
def test_promtool_takes_rules_their_tests_and_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    plain = [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in queries()]
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(plain)]
    path = tmp_path / "queries.yaml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    for arguments in (
        ("check", "rules", str(CHART / "alerts.yaml")),
        ("test", "rules", *map(str, RULE_TESTS)),
        ("check", "rules", str(path)),
    ):
        done = run("promtool", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "tiercache.service"
    text = (DEPLOY / "systemd" / "tiercache.service").read_text()
    families = next(line for line in text.splitlines() if line.startswith("RestrictAddressFamilies="))
    assert "AF_NETLINK" in families, "ZeroMQ asks for the interfaces when it binds to TCP, and aborts where it may not"
    assert "\nEnvironment=TIERCACHE_SHARED_STATE=/var/lib/tiercache/" in text, "it is in the StateDirectory"
    assert "\nStateDirectory=tiercache\n" in text
    unit.write_text(text.replace("/opt/tiercache/bin/tiercache", "/bin/true"))
    done = run("systemd-analyze", "verify", str(unit))
    assert unit.name not in done.stderr, done.stderr


# --- the chart, rendered by Helm itself: what its values become, and which it refuses ----------------


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
