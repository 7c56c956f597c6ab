"""Stock SGLang that speculates with MTP layers, as the engine of a run: what its drafts do when the run trains them.

    PYTHONPATH=SGLANG_FOLDER:src:. python benchmarks/check_sglang_draft_gpu.py [--steps 16] [--attention triton]
        [-- FLAGS OF MILES TRAIN]

A small MiMo model with one MTP layer, random weights, reverses words under GRPO with ``--rollout-backend sglang`` and
SGLang's ``NEXTN``, twice: the MTP layer as it was loaded, and trained along (``--enable-mtp-training``) and sent with
the policy. Prints for each step the mean difference of log-probs between SGLang and the trainer, which would be large
if the policy's update did not arrive, and the tokens of a verification, which grow only if the draft's do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.launch.small_run import write_inputs
from tests.models.draft.mtp_checkpoints import make_reference, save_reference

# MiMo's published checkpoints bring this class, without which transformers, and so SGLang, cannot read their config.
CONFIGURATION = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"vocab_size": 28, "eos_token_id": 27, "pad_token_id": 27}


def train(inputs: Path, run: Path, args: argparse.Namespace, *more: str) -> list[tuple[float, float]]:
    """Parity and tokens of a verification of each step."""
    flags = [
        *("--hf-checkpoint", str(inputs), "--prompt-data", str(inputs / "train.jsonl"), "--save", str(run)),
        *("--label-key", "label", "--apply-chat-template", "--custom-rm-path", "tests.launch.small_run:shared_letters"),
        *("--rollout-shuffle", "--rollout-batch-size", "16", "--n-samples-per-prompt", "8"),
        *("--rollout-max-response-len", "32", "--num-rollout", str(args.steps), "--lr", "3e-4"),
        *("--save-interval", "1000", "--view", "plain", "--dtype", "bfloat16", "--rollout-backend", "sglang"),
        # The fraction says what SGLang leaves free on a GPU that others use too; the tokens what it takes.
        *("--sglang-mem-fraction-static", "0.85", "--sglang-max-total-tokens", "65536"),
        *("--sglang-attention-backend", args.attention, "--sglang-trust-remote-code"),
        *("--sglang-sampling-backend", "pytorch", "--sglang-speculative-algorithm", "NEXTN"),
        *("--sglang-speculative-num-steps", "2", "--sglang-speculative-eagle-topk", "1"),
        *("--sglang-speculative-num-draft-tokens", "3", *more),
    ]
    subprocess.run([sys.executable, "-m", "miles.launch.main", "train", *flags], check=True)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timings = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    lengths = {
        line["step"]: line["seconds"].get("speculative/accept_length", 0.0)
        for line in timings
        if line["kind"] == "train"
    }
    return [(row["parity_mean_abs"], lengths.get(row["step"], 0.0)) for row in metrics if row["kind"] == "train"]


def add_configuration(folder: Path) -> None:
    """Put MiMo's configuration class beside its config, as its published checkpoints have it."""
    (folder / "configuration_mimo.py").write_text(CONFIGURATION)
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("num_nextn_predict_layers", 1)
    config["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--attention", default="triton", help="SGLang's attention backend")
    parser.add_argument("flags", nargs="*", help="further flags of miles train, such as --sglang-disable-cuda-graph")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        inputs = write_inputs(Path(root, "inputs"))
        save_reference(make_reference("mimo", **SIZES, **TOKENS), inputs)
        add_configuration(inputs)
        online = ("--enable-mtp-training", "--draft-lr", "1e-3")
        frozen = train(inputs, Path(root, "frozen"), args, *args.flags)
        trained = train(inputs, Path(root, "online"), args, *online, *args.flags)
    print("step  parity   tokens a verification, as loaded | parity   trained along")
    for step, (one, other) in enumerate(zip(frozen, trained, strict=True), 1):
        print(f"{step:4}  {one[0]:.1e}  {one[1]:5.2f}                          | {other[0]:.1e}  {other[1]:5.2f}")


if __name__ == "__main__":
    main()
