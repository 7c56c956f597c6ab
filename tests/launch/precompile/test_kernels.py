"""The kernels of a run are launched without a GPU: those of prefill, decoding, sampling, training and digests."""

import json
import os
import subprocess
import sys

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
PROGRAM = """
import json
import sys
from miles.kernels.runtime.fake_gpu import Target
from miles.launch.precompile import compiler, kernels
from miles.launch.read_config import read_without_rules

names, ready = [], []

def record(self, source, options):
    names.append(source.fn.__name__)

def run(self, work):
    self.started += 1
    work()

compiler.ParallelCompiler._compile = record
compiler.ParallelCompiler._fork = run
compiler.ParallelCompiler.link_driver = lambda self: None
kernels.read_target = lambda: Target(
    family="cuda", arch="90", warp_size=32, capability=(9, 0), sms=132, shared_memory=227 << 10, gpus="H200"
)
config = read_without_rules(["--hf-checkpoint", sys.argv[1]])
assert kernels.compile_run(config, lambda: ready.append(len(names)))
heavy = [name for name in ("sympy", "torch._dynamo", "transformers") if name in sys.modules]
print(json.dumps([names, ready, heavy]))
"""
# Those that the stack samples of a run on an H200 show before the end of its first step.
ROLLOUT = {
    "_checksum_kernel",
    "_rms_norm_kernel",
    "qk_norm_rope_kernel",
    "paged_prefill_kernel",
    "_gated_inference_kernel",
    "_reduce_chunks_kernel",
    "_pick_token_kernel",
    "_unpack_kernel",
    "paged_decode_kernel",
    "reduce_splits_kernel",
    "decode_bs1_kernel",
}
TRAINING = {
    "_sum_copies_kernel",
    "_qk_backward_kernel",
    "_gated_forward_kernel",
    "_gated_backward_kernel",
    "_reduce_kernel",
    "_grad_kernel",
}


def test_every_kernel_of_the_first_step_is_launched_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    names, ready, heavy = json.loads(done.stdout)
    first, rest = set(names[: ready[0]]), set(names)
    assert first >= ROLLOUT
    assert rest >= TRAINING
    assert heavy == []
    assert "Traceback" not in done.stderr
