"""Releases: the built package on each Python, its extras, the lock file, images, templates and workflows."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE = sorted((ROOT / "docker").glob("compose*.yaml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PUBLIC_HOSTS = {"pypi.org", "files.pythonhosted.org"}


class Loader(yaml.SafeLoader):
    """YAML with Compose's tag that removes what an earlier file said."""


Loader.add_constructor("!reset", lambda loader, node: None)


def named(file: Path) -> str:
    return file.name


def run(*command: str, folder: Path = ROOT, **environ: str) -> str:
    """Run a program in the checkout, or in another folder; returns what it printed."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def tool(name: str) -> str:
    """The path of a program of the extra ``release``."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip(f"needs {name}: make test-release installs it")
    return found


def find_python(version: str) -> str:
    done = subprocess.run([tool("uv"), "python", "find", version], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"Python {version} is not on this machine")
    return done.stdout.strip()


# -- the package ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(tool("uv"), "build", "--out-dir", str(folder), "--quiet")
    return folder


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.mark.release
def test_the_wheel_has_every_module_and_data_file(built: Path):
    names = set(zipfile.ZipFile(only(built, "*.whl")).namelist())
    tracked = run("git", "ls-files", "src/miles").split()
    wanted = {name.removeprefix("src/") for name in tracked if Path(name).suffix in (".py", ".pyi", ".tsv", ".jsonl")}
    wanted |= {name.removeprefix("src/") for name in tracked if "/dashboard/web/" in name}
    wanted |= {f"miles/{name}" for name in run("git", "ls-files", "recipes").split()}
    assert not wanted - names
    assert not [name for name in names if not name.startswith(("miles/", "miles_rl-"))]


@pytest.mark.release
def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path):
    sdist = only(built, "*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert f"{sdist.name.removesuffix('.tar.gz')}/LICENSE" in archive.getnames()
    run(tool("uv"), "build", "--wheel", "--out-dir", str(tmp_path), "--quiet", str(sdist))
    both = [zipfile.ZipFile(only(folder, "*.whl")) for folder in (built, tmp_path)]
    contents = [
        {each.filename: each.CRC for each in wheel.infolist() if "RECORD" not in each.filename} for wheel in both
    ]
    assert contents[0] == contents[1]


@pytest.mark.release
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_installs_and_starts(version: str, built: Path, tmp_path: Path):
    """Without torch and the other dependencies: what ``miles --version`` and flag errors need is in the package."""
    uv = tool("uv")
    run(uv, "venv", "--quiet", "--python", find_python(version), str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    wheel = only(built, "*.whl")
    run(uv, "pip", "install", "--quiet", "--python", python, "--no-deps", str(wheel))
    run(uv, "pip", "install", "--quiet", "--python", python, "numpy", "pyyaml", "rich")
    miles = str(tmp_path / "venv" / "bin" / "miles")
    assert run(miles, "--version", PYTHONPATH="") == f"miles {wheel.name.split('-')[1]}\n"
    assert "--rollout-batch-size" in run(miles, "train", "--help", PYTHONPATH="")


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a clean environment with the wheel and all its dependencies, on the Python of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", str(folder))
    install = (
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "-c",
        "constraints.txt",
    )
    run(*install, str(only(built, "*.whl")), PYTHONPATH="")
    return folder / "bin"


@pytest.mark.release
@pytest.mark.slow
def test_the_demo_learns_from_the_installed_wheel(installed: Path, tmp_path: Path):
    """Outside of the checkout: the demo writes its own data and model, and a recipe of the wheel trains that model."""
    miles = str(installed / "miles")
    code = "import miles; print(miles.__file__)"
    imported = run(str(installed / "python"), "-c", code, folder=tmp_path, PYTHONPATH="")
    assert Path(imported.strip()).is_relative_to(installed.parent)
    run(miles, "demo", "--plain", "--steps", "20", "--device", "cpu", "--save", "demo", folder=tmp_path, PYTHONPATH="")
    lines = (tmp_path / "demo" / "grpo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    before, after = (row["eval/heldout/reward"] for row in map(json.loads, lines) if row["kind"] == "eval")
    assert before > 0.3 and after > before

    run(miles, "init", "grpo_small", folder=tmp_path, PYTHONPATH="")
    (warm,) = (tmp_path / "demo" / "warmup" / "checkpoints").glob("step-*")
    sizes = {"rollout-batch-size": 4, "rollout-max-prompt-len": 16, "rollout-max-response-len": 8, "num-rollout": 2}
    flags = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    flags += ["--hf-checkpoint", str(warm), "--prompt-data", "demo/start/train.jsonl", "--rm-type", "exact"]
    flags += ["--device", "cpu", "--save", "own"]
    run(miles, "train", "grpo_small.toml", *flags, "--view", "plain", folder=tmp_path, PYTHONPATH="")
    assert (tmp_path / "own" / "checkpoints" / "step-000002" / "model.safetensors").is_file()


@pytest.mark.release
@pytest.mark.parametrize("version", PYTHONS)
def test_every_extra_resolves(version: str, tmp_path: Path):
    extras = [argument for extra in PROJECT["optional-dependencies"] for argument in ("--extra", extra)]
    out = tmp_path / "requirements.txt"
    command = ("pip", "compile", "--quiet", "--python-version", version, *extras, "-o", str(out))
    run(tool("uv"), *command, "--python-platform", "linux", "pyproject.toml")
    pins = out.read_text(encoding="utf-8")
    assert all(f"\n{name}==" in pins for name in ("torch", "transformers", "ray", "megatron-core", "verifiers"))


@pytest.mark.release
def test_the_lock_file_is_up_to_date(tmp_path: Path):
    run(tool("uv"), "lock", "--check", "--quiet")


def test_the_lock_file_names_public_indexes_alone():
    text = (ROOT / "uv.lock").read_text(encoding="utf-8")
    assert set(re.findall(r"\w+://([^/\"]+)", text)) == PUBLIC_HOSTS
    packages = {each["name"]: each for each in tomllib.loads(text)["package"]}
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert all(packages[name]["version"] == pins[name] for name in ("torch", "transformers"))
    wanted = {re.split(r"[<>=\[;]", each)[0] for each in PROJECT["dependencies"]}
    assert wanted <= set(packages)


def test_a_checkout_that_was_not_built_says_so(tmp_path: Path):
    shutil.copytree(
        ROOT / "src" / "miles" / "core", tmp_path / "miles" / "core", ignore=shutil.ignore_patterns("_version.py")
    )
    shutil.copy(ROOT / "src" / "miles" / "__init__.py", tmp_path / "miles")
    code = "import miles; print(miles.__version__)"
    assert run(sys.executable, "-c", code, PYTHONPATH=str(tmp_path)) == "0+checkout\n"
    (tmp_path / "miles" / "core" / "_version.py").write_text('version = "1.2.3"\n')
    assert run(sys.executable, "-c", code, PYTHONPATH=str(tmp_path)) == "1.2.3\n"


# -- images -----------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.parametrize("file", DOCKERFILES, ids=named)
def test_hadolint_finds_nothing(file: Path):
    assert run(tool("hadolint"), str(file)) == ""


@pytest.mark.parametrize("file", DOCKERFILES, ids=named)
def test_an_image_is_pinned_and_not_root(file: Path):
    text = file.read_text(encoding="utf-8")
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases and all(re.fullmatch(r"[\w/.-]+:\d+\.\d+\.\d+-[\w.-]+", base) for base in bases)
    packages = [word for line in re.findall(r"--no-install-recommends (.*) \\", text) for word in line.split()]
    assert all("=" in word for word in packages)
    assert text.index("USER 1000:1000") < text.index("ENTRYPOINT") and "HEALTHCHECK" in text
    copied = [words.split()[-2] for words in re.findall(r"^COPY (?!--from)(.*)", text, re.MULTILINE)]
    assert all((ROOT / each).exists() for each in copied)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) <= allowed


@pytest.mark.release
@pytest.mark.slow
def test_the_commands_of_the_cpu_image_install_a_package_that_runs(tmp_path: Path):
    """The build stage in a virtual environment, with torch of the index at hand."""
    text = (ROOT / "docker" / "cpu.Dockerfile").read_text(encoding="utf-8")
    install = re.search(r"RUN (pip install -c pins.txt .*)", text)
    assert install is not None
    source = tmp_path / "source"
    build_stage = text.partition("\nFROM")[2].partition("\nFROM")[0]
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", build_stage, re.MULTILINE) for name in line.split()]
    for name in run("git", "ls-files", *copied).split():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("triton==")]
    (source / "pins.txt").write_text("\n".join(pins) + "\n")
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    environ = {"PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}", "EXTRAS": "serve,graders"}
    environ |= {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_MILES_RL": "9.8.7", "PYTHONPATH": ""}
    run("bash", "-ec", f"cd {source} && {install[1]}", **environ)
    assert run("miles", "--version", **environ) == "miles 9.8.7\n"
    assert "qwen3/0.6b_gsm8k_1x24gb" in run("miles", "recipes", folder=tmp_path, **environ)


def load_health_check() -> Any:
    spec = importlib.util.spec_from_file_location("health_check", ROOT / "docker" / "health_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Answer(BaseHTTPRequestHandler):
    """A server that is healthy under one path."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def test_the_health_check_asks_the_server():
    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    find_problem = load_health_check().find_problem
    assert find_problem({"MILES_HEALTH_URL": f"{url}/health"}, 0.0) is None
    assert "503" in find_problem({"MILES_HEALTH_URL": f"{url}/broken"}, 0.0)
    server.shutdown()
    server.server_close()
    assert "does not answer" in find_problem({"MILES_HEALTH_URL": f"{url}/health"}, 0.0)


def test_the_health_check_reads_the_events_of_a_run(tmp_path: Path):
    find_problem = load_health_check().find_problem
    environ = {"MILES_RUN": str(tmp_path), "MILES_HEALTH_SECONDS": "60"}
    assert "has not started" in find_problem(environ, 0.0)
    events = tmp_path / "events.jsonl"
    events.write_text("{}\n")
    os.utime(events, (1000, 1000))
    assert find_problem(environ, 1060.0) is None
    assert "has not grown for 61 s" in find_problem(environ, 1061.0)
    assert find_problem({}, 0.0) is None


# -- templates --------------------------------------------------------------------------------


@pytest.mark.release
def test_the_compose_file_fits_the_schema():
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", "docker/compose.yaml")


@pytest.mark.parametrize("file", COMPOSE, ids=named)
def test_compose_files_name_images_and_services_that_exist(file: Path):
    compose = yaml.load(file.read_text(encoding="utf-8"), Loader)
    whole = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
    assert set(compose["services"]) == set(whole["services"])
    for service in compose["services"].values():
        assert (ROOT / service["build"]["dockerfile"]).is_file()
    ports = [port for service in whole["services"].values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


# Fields of ray.io/v1 RayJob and of core/v1 PodSpec that the template may use, with the type of each.
RAY_JOB = {
    "entrypoint": str,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "backoffLimit": int,
    "runtimeEnvYAML": str,
    "rayClusterSpec": dict,
}
POD = {"containers": list, "volumes": list, "securityContext": dict, "terminationGracePeriodSeconds": int}


@pytest.mark.parametrize("file", [ROOT / "deploy" / "kuberay.yaml", ROOT / "scripts" / "kuberay.yaml"], ids=str)
def test_the_ray_job_has_the_fields_of_its_kind(file: Path):
    job = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert all(isinstance(value, RAY_JOB[name]) for name, value in job["spec"].items())
    cluster = job["spec"]["rayClusterSpec"]
    assert {"headGroupSpec", "workerGroupSpecs"} <= set(cluster) <= {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert (ROOT / job["spec"]["entrypoint"].split()[1]).is_file()
    assert all(isinstance(value, str) for value in yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"].values())
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert all(isinstance(value, POD[name]) for name, value in pod.items())
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {"name", "image", "resources", "volumeMounts"} <= set(container)
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_the_cluster_of_the_ray_job_has_the_pinned_ray_and_is_not_root():
    job = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text(encoding="utf-8"))
    cluster = job["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    assert cluster["headGroupSpec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


@pytest.mark.release
def test_shellcheck_finds_nothing():
    run(tool("shellcheck"), *map(str, (ROOT / "deploy").glob("*.sbatch")))


# -- GitHub -----------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        (
            "vendor.github-issue-forms",
            [ROOT / ".github/ISSUE_TEMPLATE/bug.yml", ROOT / ".github/ISSUE_TEMPLATE/feature.yml"],
        ),
        ("vendor.github-issue-config", [ROOT / ".github/ISSUE_TEMPLATE/config.yml"]),
        ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_of_github_fit_their_schemas(schema: str, files: list[Path]):
    run(tool("check-jsonschema"), "--builtin-schema", schema, *map(str, files))


@pytest.mark.parametrize("file", WORKFLOWS, ids=named)
def test_a_workflow_pins_its_actions_and_asks_for_few_rights(file: Path):
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 300
        for step in job["steps"]:
            assert "uses" not in step or re.search(r"@[0-9a-f]{40}$", step["uses"]), step
            for target in re.findall(r"^make ([\w-]+)$", step.get("run", "")):
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_a_release_publishes_without_a_token_what_was_tested_and_attested():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text(encoding="utf-8"))["jobs"]
    assert [jobs[name].get("needs") for name in ("build", "attest", "publish")] == [None, "build", "attest"]
    assert "make test-release" in [step.get("run") for step in jobs["build"]["steps"]]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets" not in json.dumps(jobs)


def test_the_pythons_of_the_package_are_those_of_the_workflow():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yaml").read_text(encoding="utf-8"))
    assert tuple(workflow["jobs"]["test"]["strategy"]["matrix"]["python"]) == PYTHONS
    listed = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert tuple(listed) == PYTHONS
