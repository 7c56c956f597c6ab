"""The first command of upstream's documentation trains, with its checkpoint named by --model-name."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.launch.small_run import ROOT, write_inputs

FIRST = "--advantage-estimator grpo --model-name qwen3-30b-a3b --rollout-batch-size 4 --n-samples-per-prompt 4"
DATA = "--prompt-data qwen3-30b-a3b/train.jsonl --label-key label --apply-chat-template --num-rollout 2 --save run"
REWARD = "--custom-rm-path tests.launch.small_run:shared_letters --rollout-max-response-len 6"
USUAL = (
    "--actor-num-nodes 1 --actor-num-gpus-per-node 1 --colocate --num-experts 4 --swiglu --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --attention-softmax-in-fp32 --attention-backend flash --sglang-mem-fraction-static 0.3 "
    "--sglang-cuda-graph-bs 1 2 4 --use-swanlab --ref-load qwen3-30b-a3b_torch_dist --use-kl-loss --kl-loss-coef 0.01"
)


def test_the_first_command_of_upstream_trains_two_steps_and_resumes_from_its_record(tmp_path: Path):
    write_inputs(tmp_path / "qwen3-30b-a3b", moe=True)
    environment = dict(os.environ) | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}

    def run(*words: str) -> str:
        argv = [sys.executable, *words, "--num-threads", "1", "--view", "plain"]
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    experts = json.loads((tmp_path / "qwen3-30b-a3b" / "config.json").read_text())["num_experts"]
    usual = USUAL.replace("--num-experts 4", f"--num-experts {experts}")
    said = run(str(ROOT / "train.py"), *f"{FIRST} {DATA} {REWARD} {usual}".split())
    assert "2 flags restate the checkpoint: agreed" in said
    assert "4 flags of Megatron's implementation" in said
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
    record = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert record["native"]["engine_memory_fraction"] == 0.3
    assert record["sglang"]["sglang_flags"] == ["--cuda-graph-bs", "1", "2", "4"]
    assert "--use-swanlab" in record["upstream"]["upstream_flags"]
    run("-m", "miles.launch.main", "train", "run/config.toml", "--num-rollout", "3")
    steps = [json.loads(line).get("step") for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(step for step in steps if step is not None) == 3
