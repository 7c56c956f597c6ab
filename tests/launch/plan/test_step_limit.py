"""The plan's time limit of a step: closed forms of a published model, and a sentence where nothing is known."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.small_config import furnish

from miles.launch.main import main
from miles.launch.plan import step_limit
from miles.models.accounting.known_models import find_known_config

FLOPS, BANDWIDTH, LINK = 989e12, 4.8e12, 450e9
"""Of an H200, per second."""
LAYERS, WIDTH, INNER, VOCABULARY, HEADS, KV_HEADS, HEAD = 28, 1024, 3072, 151936, 16, 8, 128
MATMUL = LAYERS * (WIDTH * HEAD * (2 * HEADS + 2 * KV_HEADS) + 3 * WIDTH * INNER)
"""Parameters of the matmuls inside the layers of Qwen3-0.6B."""
PARAMETERS = MATMUL + VOCABULARY * WIDTH + LAYERS * (2 * WIDTH + 2 * HEAD) + WIDTH
PROMPTS, SAMPLES, PROMPT, RESPONSE = 16, 8, 256, 512


@pytest.fixture(autouse=True)
def qwen3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    config = find_known_config("Qwen3-0.6B")
    assert config is not None
    (tmp_path / "model" / "config.json").write_text(json.dumps(dict(config)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan(capsys: pytest.CaptureFixture[str], line: str = "", gpu: str = "H200") -> dict:
    return plan_all(capsys, line, gpu)["time_limit"]


def plan_all(capsys: pytest.CaptureFixture[str], line: str = "", gpu: str = "H200") -> dict:
    words = f"--device cuda --dtype bfloat16 --rollout-max-prompt-len {PROMPT} --rollout-max-response-len {RESPONSE}"
    argv = ["plan", "good.toml", *words.split(), *line.split(), "--json", *(["--gpu", gpu] if gpu else [])]
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out)


def seconds(found: dict) -> dict[str, float]:
    return {part["name"]: part["seconds"] for part in found["parts"]}


def test_each_part_is_its_closed_form(capsys: pytest.CaptureFixture[str]):
    found = plan(capsys, "--num-steps-per-rollout 2")
    attention = 4 * HEADS * HEAD * LAYERS  # FLOPs of a token and an earlier one
    prefill = PROMPTS * (PROMPT * (2 * MATMUL + attention * PROMPT / 2) + 2 * VOCABULARY * WIDTH)
    key_values = LAYERS * 2 * KV_HEADS * HEAD * 2
    own = PROMPTS * SAMPLES * RESPONSE * (RESPONSE - 1) / 2
    decode = RESPONSE * PARAMETERS * 2 + (own + PROMPTS * PROMPT * RESPONSE) * key_values
    length, rows = PROMPT + RESPONSE, PROMPTS * SAMPLES
    forward = rows * length * (2 * MATMUL + 2 * VOCABULARY * WIDTH + attention * length / 2)
    update = PARAMETERS * (4 + 2 * (8 + 4) + 2)  # gradients; moments and masters, twice; bf16 weights
    expected = {
        "rollout/prefill": prefill / FLOPS,
        "rollout/decode": decode / BANDWIDTH,
        "train/old_logprobs": forward / FLOPS,
        "train/forward_backward": 3 * forward / FLOPS,
        "train/optimizer": 2 * update / BANDWIDTH,
        "publish/weights": 0.0,
    }
    assert seconds(found) == pytest.approx(expected, rel=1e-6)
    assert found["seconds"] == pytest.approx(sum(expected.values()))
    assert found["device"]["peak"] == {"flops": FLOPS, "bandwidth": BANDWIDTH, "link": LINK, "memory_gb": 141}


def test_a_named_gpu_is_planned_with_its_dtype_and_memory(capsys: pytest.CaptureFixture[str]):
    words = ["plan", "good.toml", "--gpu", "H200", "--rollout-max-context-len", "4096"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["plan"]["device"], found["machine_problems"]) == ("cuda", [])
    sizes = {share["name"]: share["bytes"] for share in found["memory"]}
    # All but the KV cache, which sleeps while the trainer works; CUDA graphs stay.
    assert found["fit"]["training"] == sum(sizes.values()) - sizes["kv cache"]
    assert found["fit"]["usable"] == round(0.9 * 141e9) and found["fit"]["problems"] == []
    small = plan_all(capsys, "--max-tokens-per-gpu 16384 --rollout-max-context-len 16384", gpu="RTX 3090")["fit"]
    assert small["problems"][0].endswith("but 22 GB of RTX 3090 are usable"), small
    assert main(words) == 0
    said = capsys.readouterr().out
    assert ": it fits" in said and "planned for H200" in said and "cannot run it" not in said


def test_without_a_gpu_nothing_is_said_of_its_memory(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "good.toml", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"] is None


def test_options_change_the_parts_they_are_about(capsys: pytest.CaptureFixture[str]):
    plain = seconds(plan(capsys))
    assert "train/old_logprobs" not in plain and "train/reference" not in plain
    full = seconds(plan(capsys, "--gradient-checkpointing --use-kl-loss"))
    assert full["train/reference"] == pytest.approx(plain["train/forward_backward"] / 3)
    assert full["train/forward_backward"] / plain["train/forward_backward"] == pytest.approx(1.25, abs=0.1)
    assert full["train/forward_backward"] < plain["train/forward_backward"] * 4 / 3  # logits are not computed again
    doubled = plan(capsys, "--mfu-peak-tflops 1978")
    assert seconds(doubled)["train/forward_backward"] == pytest.approx(plain["train/forward_backward"] / 2)
    assert doubled["device"]["source"] == "--mfu-peak-tflops"
    lora = seconds(plan(capsys, "--lora-rank 8"))
    assert lora["train/forward_backward"] == pytest.approx(plain["train/forward_backward"] * 2 / 3)
    assert lora["train/optimizer"] < plain["train/optimizer"] / 20
    offloaded = plan(capsys, "--optimizer-cpu-offload")
    (part,) = [part for part in offloaded["parts"] if part["name"] == "train/optimizer"]
    assert part["seconds"] is None and "host memory" in part["why"]


def test_publication_is_bounded_by_its_way_to_the_engines(capsys: pytest.CaptureFixture[str]):
    def publish(line: str) -> dict:
        parts = plan(capsys, line)["parts"]
        return next(part for part in parts if part["name"] == "publish/weights")

    weights = 2 * PARAMETERS
    assert publish("--max-weight-staleness 1")["seconds"] == pytest.approx(2 * weights / BANDWIDTH)
    served = "--rollout-backend served --rollout-num-gpus 1 --update-weight-transport"
    assert publish(f"{served} distributed")["seconds"] == pytest.approx(weights / LINK)
    disk = publish(f"{served} disk")
    assert disk["seconds"] is None and "--update-weight-transport disk" in disk["why"]


def test_engines_of_their_own_devices_share_the_responses_and_overlap(capsys: pytest.CaptureFixture[str]):
    one = "--rollout-backend served --rollout-num-gpus 1 --max-weight-staleness 1 --update-weight-transport distributed"
    first, second = plan(capsys, one), plan(capsys, one.replace("gpus 1", "gpus 2"))
    assert seconds(second)["rollout/prefill"] == pytest.approx(seconds(first)["rollout/prefill"] / 2)
    assert 0.5 < seconds(second)["rollout/decode"] / seconds(first)["rollout/decode"] < 1  # weights are read by both
    rollout = sum(value for name, value in seconds(first).items() if name.startswith("rollout/"))
    rest = sum(value for name, value in seconds(first).items() if not name.startswith("rollout/"))
    assert first["concurrent"] and first["seconds"] == pytest.approx(max(rollout, rest))


@pytest.mark.parametrize(
    ("line", "gpu", "expected"),
    [
        ("--device cpu", "", "measured when a run starts"),
        ("", "Abacus 3", "has no Abacus 3"),
        ("", "", "--gpu NAME"),
        ("--loss-type sft_loss --no-rm-type", "H200", "--rollout-max-context-len"),
    ],
)
def test_what_is_not_known_is_stated(capsys: pytest.CaptureFixture[str], monkeypatch, line, gpu, expected):
    monkeypatch.setattr(step_limit, "read_accelerator_name", lambda: None)
    argv = ["plan", "good.toml", "--device", "cuda", *line.split(), *(["--gpu", gpu] if gpu else [])]
    assert main(argv) == 0
    section = capsys.readouterr().out.partition("time limit of a step\n")[2].partition("\n\n")[0]
    assert section.startswith("  no limit known: ") and expected in section


def test_a_gpu_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "good.toml", "--gpu"]) == 2
    assert "--gpu needs the name of a GPU" in capsys.readouterr().err


def test_the_plan_prints_it_without_torch_and_numpy():
    program = (
        "import sys; from miles.launch.main import main\n"
        "main(['plan', 'good.toml', '--gpu', 'H200'])\n"
        "sys.exit(sorted({'torch', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    section = done.stdout.partition("time limit of a step\n")[2].partition("\n\n")[0]
    assert "H200: 989 TFLOP/s" in section and "at least, one part after the other" in section
