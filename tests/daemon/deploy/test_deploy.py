"""Deployment files name only existing settings and metrics, and pass the installed validators."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kubernetes_objects import objects_of, validate

from tiercache import __version__
from tiercache.config.settings import SETTINGS

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "daemon" / "deploy"
CHART = DEPLOY / "helm" / "tiercache"
RULE_TESTS = sorted(CHART.glob("alerts*_test.yaml"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
GUIDE = (ROOT / "daemon" / "OPERATING.md").read_text()
each_manifest = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)


def documented_metrics() -> dict[str, str]:
    """Name and kind of each metric, as MONITORING.md has them; another test holds that to the code."""
    text = (ROOT / "daemon" / "MONITORING.md").read_text()
    return dict(re.findall(r"^\| `(tiercache_\w+)` \| (\w+) \|", text, re.MULTILINE))


def queries() -> list[str]:
    """The queries of the dashboard's panels."""
    panels = json.loads((CHART / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_metrics_in_rules_and_panels_exist() -> None:
    known = documented_metrics()
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
