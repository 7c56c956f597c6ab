"""Run three recipes of tinker-cookbook, unchanged and at the same time, on one training service; plot their curves.

Each recipe is a tenant of its own: supervised fine-tuning (``sl_loop``), reinforcement learning (``rl_loop``) and
preference optimization (``preference.dpo``). They share the base model, and passes over it where they meet.

    pip install 'miles-rl[serve,service]' tinker-cookbook==0.5.8 matplotlib
    python examples/service/run_recipes.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from recipe_workspace import MODEL, build_workspace

COMMON = [f"model_name={MODEL}"]
RECIPES = {
    "sft": (
        "tinker_cookbook.recipes.sl_loop",
        ["batch_size=16", "learning_rate=5e-3", "max_steps={steps}", "max_length=512", "lora_rank=16"],
        "train_mean_nll",
    ),
    "rl": (
        "tinker_cookbook.recipes.rl_loop",
        ["batch_size=8", "group_size=16", "learning_rate=6e-3", "max_tokens=16", "max_steps={steps}", "lora_rank=16"],
        "reward/total",
    ),
    "dpo": (
        "tinker_cookbook.recipes.preference.dpo.train",
        ["dataset=hhh", "batch_size=16", "learning_rate=1e-3", "max_steps={steps}", "max_length=512"],
        "dpo_loss",
    ),
}


def start_service(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the service in the folder with a tenant for each recipe; returns its process and its address."""
    tables = "".join(f'[tenants.{name}]\nkey = "{make_key(name)}"\n' for name in RECIPES)
    (folder / "tenants.toml").write_text(tables, encoding="utf-8")
    command = [sys.executable, "-m", "miles", "serve", MODEL, "--served-model-name", MODEL, "--train", "--port", "0"]
    command += ["--service-directory", "service", "--service-tenants", "tenants.toml", "--engine-kv-tokens", "65536"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    if found is None:
        raise SystemExit(f"the service did not start: {line}")
    return process, found[0]


def make_key(name: str) -> str:
    """The key of a recipe's tenant. A real service has keys that nobody can guess."""
    return f"tml-example-key-of-{name}"


def start_recipe(folder: Path, url: str, name: str, steps: int) -> subprocess.Popen[str]:
    module, options, _ = RECIPES[name]
    command = [sys.executable, "-m", module, *COMMON, *(option.format(steps=steps) for option in options)]
    command += [f"base_url={url}", f"log_path={folder / 'logs' / name}"]
    command += ["behavior_if_log_dir_exists=delete"] if name == "dpo" else []
    environment = os.environ | {"TINKER_API_KEY": make_key(name), "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    (folder / "logs" / name).mkdir(parents=True, exist_ok=True)
    output = (folder / "logs" / f"{name}.txt").open("w")
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)


def read_curve(folder: Path, name: str) -> list[float]:
    """The curve of a recipe, from the metrics that it wrote."""
    lines = (folder / "logs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row[RECIPES[name][2]] for row in rows if RECIPES[name][2] in row]


def plot(folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(RECIPES), figsize=(12, 3.2))
    for axis, (name, (_, _, metric)) in zip(axes, RECIPES.items(), strict=True):
        axis.plot(read_curve(folder, name))
        axis.set(title=name, xlabel="step", ylabel=metric)
    figure.tight_layout()
    figure.savefig(folder / "recipes.png", dpi=120)
    return folder / "recipes.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model, data, logs and curves are written")
    parser.add_argument("--steps", type=int, default=50, help="steps of each recipe")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    build_workspace(folder)
    service, url = start_service(folder)
    try:
        running = {name: start_recipe(folder, url, name, arguments.steps) for name in RECIPES}
        for name, process in running.items():
            if process.wait():
                raise SystemExit(f"{name} failed; see {folder / 'logs' / name}.txt")
        with urllib.request.urlopen(f"{url}/metrics") as response:
            lines = response.read().decode().splitlines()
        print("\n".join(line for line in lines if line.startswith("miles_service_") and "passes" in line))
    finally:
        service.terminate()
        service.wait()
    for name in RECIPES:
        curve = read_curve(folder, name)
        print(f"{name}: {RECIPES[name][2]} {curve[0]:.3f} -> {curve[-1]:.3f}")
    print(plot(folder))


if __name__ == "__main__":
    main()
