"""Whole small runs on one GPU: `miles train` of each model family, with adapters, replay and Megatron, and the service.

    PYTHONPATH=src:. python benchmarks/check_runs_gpu.py [WORD...] [--device cuda] [--at-once 6] [--logs FOLDER]

Each case is two or three steps on a model of two to four layers, in processes of its own, and held against something:

- engine and trainer give every sampled token the same log-prob: to the bit in cases named ``exact``, to 1e-4 in
  float32; cases named ``bf16`` only print their differences,
- stopped: a run that ends after a step is continued by the same command,
- resumed: the last step, made once more from the checkpoint before it, has the same figures,
- converted: `miles convert` makes a Hugging Face folder with all tensors of the model, some of them trained,
- as fsdp: the losses are those of the FSDP2 trainer on the same device.

``service`` trains an adapter over HTTP, samples from it and compares the sampled log-probs with those of a forward
pass. WORDs choose cases by a part of their name: ``megatron`` those of Megatron-Core, which must then be importable.
Lines are printed as cases end; what the processes of a failed one said is written to ``--logs``. ``--device cpu`` runs
the same on a CPU, where Megatron gets a stand-in for CUDA (`tests/backends/megatron/shim.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

EXACT = ("--parity", "exact")
BF16 = ("--dtype", "bfloat16")
ADAPTER = ("--lora-rank", "4", "--lora-alpha", "8")
MEGATRON = ("--train-backend", "megatron")
DISTRIBUTED = (*MEGATRON, "--megatron-use-distributed-optimizer")
TORCH_DIST = ("--ckpt-format", "torch_dist")
TOLERANCE = 1e-4
LIMIT_SECONDS = 300
STOP_SECONDS = 15
ROOT = Path(__file__).parents[1]
# Models are made one at a time: torch's generator is one for all threads.
_SEEDED = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: the kind of its model (``dense`` and ``moe`` are the demo's), its flags, and what it is held against.

    ``task`` is what it learns from: ``words`` and ``images`` are sampled for, ``pairs`` and ``answers`` are read.
    ``only`` are flags that the run of the FSDP2 trainer which it is ``as_fsdp`` does not have.
    """

    name: str
    kind: str
    flags: tuple[str, ...] = ()
    config: tuple[tuple[str, object], ...] = ()
    only: tuple[str, ...] = ()
    task: str = "words"
    steps: int = 2
    stopped: bool = False
    resumed: bool = False
    converted: bool = False
    as_fsdp: bool = False

    @property
    def tolerance(self) -> float:
        return 0.0 if "exact" in self.name else float("inf") if "bf16" in self.name else TOLERANCE

    @property
    def is_megatron(self) -> bool:
        return "megatron" in (*self.flags, *self.only)


RECURRENT = ("hybrid qwen3 next", "hybrid qwen3.5 moe", "hybrid nemotron 3", "hybrid kimi linear", "lfm2")
SPARSE = ("deepseek v3.2", "glm 5 shared choices")
NEWEST = (
    *("deepseek v4", "hybrid glm 5.3 flash", "minimax-m3", "gemma3n", "ernie 4.5 moe", "hunyuan moe"),
    *("mistral 4", "gemma4 with experts"),
)
MEGATRON_KINDS = ("qwen3", "qwen3 moe normalised", "kimi k2", "deepseek v4", "hybrid qwen4")
SHORT_INDEXER = (("index_topk", 4),)
UNTIED = (("tie_word_embeddings", False),)
NAMED = ("--no-lora-merge", "--lora-versions", "2", *ADAPTER)
EXPERTS = ("--target-modules", "attn,experts")
HEAD = ("--target-modules", "all-linear,lm_head")
PPO = ("--advantage-estimator", "ppo", "--critic-lr", "1e-3")
TRACKED = ("--ref-update-interval", "2", "--kl-loss-coef", "0.1")
REPLAY = ("--use-rollout-indexer-replay", "--rollout-dtype", "bfloat16", "--dtype", "float32", "--lr", "0")
RESUMED: dict[str, Any] = {"resumed": True, "steps": 3}
SAVED: dict[str, Any] = {"resumed": True, "converted": True, "steps": 3}


def list_cases() -> Iterator[Case]:
    yield Case(name="lora versions exact", kind="dense", flags=(*NAMED, *EXACT))
    stale = ("--max-weight-staleness", "2")
    yield Case(name="lora versions bf16 asynchronous", kind="dense", flags=(*NAMED, *BF16, *stale))
    yield Case(name="lora versions experts exact", kind="moe", flags=(*NAMED, *EXPERTS, *EXACT))
    head = (*ADAPTER, *HEAD, *EXACT)
    yield Case(name="lora output layer exact", kind="qwen3", flags=(*head, "--no-lora-merge"), config=UNTIED)
    yield Case(name="lora output layer merged exact bf16", kind="qwen3", flags=(*head, *BF16), config=UNTIED)
    for kind in (*RECURRENT, *SPARSE):
        short = SHORT_INDEXER if kind in SPARSE else ()
        yield Case(name=f"{kind} exact", kind=kind, flags=EXACT, config=short)
        yield Case(name=f"{kind} exact bf16", kind=kind, flags=(*EXACT, *BF16), config=short)
    for kind in NEWEST:
        yield Case(name=kind, kind=kind)
        yield Case(name=f"{kind} bf16", kind=kind, flags=BF16)
    yield Case(name="indexer replay bf16", kind="deepseek v3.2", flags=REPLAY, config=SHORT_INDEXER)
    # Those with several processes, one after the other, begin first.
    yield from list_megatron_checkpoints()
    yield from list_megatron_objectives()
    yield from list_megatron_offloading()
    yield from list_megatron_runs()
    yield from list_megatron_adapters()
    for kind in MEGATRON_KINDS:
        yield Case(name=f"megatron {kind}", kind=kind, flags=MEGATRON)
        yield Case(name=f"megatron {kind} exact bf16", kind=kind, flags=(*MEGATRON, *EXACT, *BF16))
        name = f"megatron {kind} distributed optimizer bf16"
        yield Case(name=name, kind=kind, flags=(*DISTRIBUTED, *BF16))
    yield Case(name="megatron torch_dist exact", kind="qwen3", flags=(*DISTRIBUTED, *EXACT, *TORCH_DIST))


def list_megatron_adapters() -> Iterator[Case]:
    """Adapters over a packed base and in every form."""
    packed = (*MEGATRON, *ADAPTER, *EXACT, *BF16, "--train-precision")
    for precision in ("fp8", "int8", "int4_g32", "nvfp4", "mxfp4"):
        name = f"megatron packed {precision} exact bf16"
        yield Case(name=name, kind="blocks", flags=(*packed, precision))
    experts = (*packed, "int4_g32", "--target-modules", "all-linear,experts", "--use-rollout-routing-replay")
    yield Case(name="megatron packed experts int4 exact bf16", kind="moe", flags=experts)
    shared = (*DISTRIBUTED, *ADAPTER, *BF16, "--train-precision", "fp8", *TRACKED)
    yield Case(name="megatron packed fp8 shared moments resumed bf16", kind="blocks", flags=shared, **RESUMED)
    yield Case(name="megatron adapters dora exact", kind="moe", flags=(*MEGATRON, *ADAPTER, "--use-dora", *EXACT))
    named = (*DISTRIBUTED, *NAMED, *EXPERTS, *EXACT)
    yield Case(name="megatron adapters experts versions exact", kind="moe", flags=named)
    head = (*DISTRIBUTED, *ADAPTER, *HEAD, *EXACT, *BF16)
    yield Case(name="megatron adapters output layer exact bf16", kind="qwen3", flags=head, config=UNTIED)
    dropout = (*MEGATRON, *ADAPTER, "--lora-dropout", "0.2", "--gradient-checkpointing")
    yield Case(name="megatron adapters dropout recomputed", kind="qwen3", flags=dropout)
    stale = (*DISTRIBUTED, *NAMED, *BF16, "--max-weight-staleness", "2")
    yield Case(name="megatron adapters bf16 asynchronous", kind="qwen3", flags=stale, steps=3)


def list_megatron_offloading() -> Iterator[Case]:
    """Weights and optimizers that are on the host while engines sample, also when a stopped run is saved."""
    offloaded = (*DISTRIBUTED, *PPO, "--offload")
    yield Case(name="megatron offload critic exact", kind="qwen3", flags=(*offloaded, *EXACT))
    yield Case(name="megatron offload adapters bf16", kind="qwen3", flags=(*offloaded, *ADAPTER, *BF16))
    yield Case(name="megatron offload optimizer", kind="qwen3", flags=(*MEGATRON, "--optimizer-cpu-offload"))
    served = ("--rollout-backend", "served", "--colocate", "--offload")
    whole = (*DISTRIBUTED, *served, *BF16, *TORCH_DIST)
    yield Case(name="megatron offload served bf16", kind="moe", flags=whole, **RESUMED)
    packed = (*MEGATRON, *ADAPTER, *served, *EXACT, *BF16, "--train-precision", "fp8")
    yield Case(name="megatron offload served packed exact bf16", kind="blocks", flags=packed)
    dist = (*DISTRIBUTED, *EXACT, *TORCH_DIST, "--offload")
    yield Case(name="megatron offload stopped torch_dist exact", kind="moe", flags=dist, stopped=True)
    beside = (*DISTRIBUTED, *NAMED, *EXACT, "--offload")
    yield Case(name="megatron offload stopped unmerged exact", kind="qwen3", flags=beside, stopped=True)
    yield Case(
        name="megatron offload stopped dist unmerged exact", kind="moe", flags=(*beside, *TORCH_DIST), stopped=True
    )


def list_megatron_runs() -> Iterator[Case]:
    """Draft models, recomputation, load balancing, replay, images and roles."""
    eagle = ("--draft-train", "eagle3", "--draft-lr", "1e-2", "--draft-train-steps", "2")
    eagle += ("--speculative-algorithm", "eagle3", "--disable-speculative-adaptive")
    trained = (*DISTRIBUTED, *EXACT, *eagle, *TORCH_DIST)
    yield Case(name="megatron eagle drafts exact", kind="moe", flags=trained, **RESUMED)
    yield Case(name="megatron eagle drafts adapters bf16", kind="dense", flags=(*MEGATRON, *ADAPTER, *BF16, *eagle))
    mtp = ("--enable-mtp-training", "--mtp-num-layers", "1", "--draft-lr", "1e-2", "--draft-train-steps", "2")
    mtp += ("--speculative-algorithm", "mtp", "--disable-speculative-adaptive")
    yield Case(name="megatron mtp drafts converted", kind="mimo", flags=(*MEGATRON, *mtp, *TORCH_DIST), converted=True)
    full = ("--recompute-granularity", "full", "--recompute-method")
    block = (*full, "block", "--recompute-num-layers", "1")
    yield Case(name="megatron recompute block exact", kind="qwen3", flags=(*DISTRIBUTED, *EXACT, *block))
    uniform = (*full, "uniform", "--recompute-num-layers", "1", "--use-rollout-routing-replay")
    yield Case(name="megatron recompute uniform adapters", kind="moe", flags=(*MEGATRON, *ADAPTER, *EXPERTS, *uniform))
    selective = ("--recompute-granularity", "selective", "--megatron-recompute-modules", "core_attn", "mlp")
    yield Case(name="megatron recompute selective bf16", kind="qwen3", flags=(*DISTRIBUTED, *BF16, *selective))
    balance = ("--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.001")
    yield Case(name="megatron router balance bf16", kind="qwen3 moe normalised", flags=(*DISTRIBUTED, *BF16, *balance))
    bias = (*MEGATRON, "--moe-router-bias-update-rate", "0.001")
    yield Case(name="megatron router bias", kind="kimi k2", flags=bias)
    yield Case(
        name="megatron indexer replay bf16", kind="deepseek v3.2", flags=(*MEGATRON, *REPLAY), config=SHORT_INDEXER
    )
    tower = (*DISTRIBUTED, *EXACT, "--vision-lr", "1e-4", *TORCH_DIST)
    yield Case(name="megatron images vision lr exact", kind="qwen2_5_vl", flags=tower, task="images", **RESUMED)
    adapted = (*DISTRIBUTED, *ADAPTER, "--target-modules", "all-linear,vision", *TORCH_DIST)
    yield Case(name="megatron images adapters converted", kind="qwen3_vl", flags=adapted, task="images", converted=True)
    roles = '{"solver": {}, "verifier": {"weights": "solver"}}'
    cast = ("--policies", roles, "--custom-cast-function-path", "solver_verifier")
    yield Case(name="megatron two roles", kind="qwen3", flags=(*MEGATRON, *cast))


def list_megatron_checkpoints() -> Iterator[Case]:
    """What is saved and read: torch_dist, with adapters of every form and in the background."""
    adapters = (*MEGATRON, *TORCH_DIST, *ADAPTER)
    yield Case(name="megatron torch_dist adapters exact", kind="qwen3", flags=(*adapters, *EXACT), **SAVED)
    shared = (*DISTRIBUTED, *TORCH_DIST, *ADAPTER, *BF16)
    yield Case(name="megatron torch_dist adapters bf16", kind="qwen3", flags=shared, **SAVED)
    yield Case(name="megatron torch_dist dora", kind="qwen3", flags=(*adapters, "--use-dora"), **SAVED)
    beside = (*MEGATRON, *TORCH_DIST, *NAMED, *EXPERTS, *EXACT)
    yield Case(name="megatron torch_dist unmerged experts exact", kind="moe", flags=beside, **SAVED)
    decoder = ("hybrid qwen3 next", (*DISTRIBUTED, *TORCH_DIST))
    yield Case(name="megatron torch_dist decoder modules", kind=decoder[0], flags=decoder[1], **SAVED)
    background = (*DISTRIBUTED, *TORCH_DIST, "--async-save")
    yield Case(name="megatron async save exact", kind="moe", flags=(*background, *EXACT), **SAVED)
    yield Case(name="megatron async save bf16", kind="qwen3", flags=(*background, *BF16), **SAVED)
    beside = (*background, *NAMED, *EXACT)
    yield Case(name="megatron async save unmerged exact", kind="qwen3", flags=beside, **SAVED)
    hf = (*DISTRIBUTED, "--async-save", *BF16)
    yield Case(name="megatron async save hf bf16", kind="qwen3", flags=hf, **RESUMED)


def list_megatron_objectives() -> Iterator[Case]:
    """What is learned: with a reference that follows, a critic, a teacher; and rewards, preferences, demonstrations."""
    yield Case(
        name="megatron reference exact", kind="qwen3", flags=(*DISTRIBUTED, *EXACT, *TRACKED, *TORCH_DIST), **RESUMED
    )
    yield Case(name="megatron reference adapters", kind="qwen3", flags=(*MEGATRON, *ADAPTER, *TRACKED), **RESUMED)
    yield Case(name="megatron critic bf16", kind="qwen3", flags=(*DISTRIBUTED, *BF16, *PPO, *TORCH_DIST), **RESUMED)
    adapters = (*DISTRIBUTED, *ADAPTER, *PPO)
    yield Case(name="megatron critic adapters", kind="qwen3", flags=adapters, **RESUMED)
    teacher = ("--advantage-estimator", "on_policy_distillation", "--opd-teacher-load", "{model}")
    yield Case(name="megatron teacher", kind="qwen3", flags=(*MEGATRON, *teacher, "--opd-log-prob-top-k", "8"))
    rewards = ("--loss-type", "rm_loss", "--lr", "3e-3")
    dist = (*DISTRIBUTED, *TORCH_DIST)
    pairs: dict[str, Any] = {"kind": "dense", "task": "pairs", "as_fsdp": True}
    yield Case(name="megatron reward model", flags=rewards, only=dist, **pairs, **SAVED)
    adapted = (*rewards, *ADAPTER)
    yield Case(name="megatron reward model adapters", flags=adapted, only=(*MEGATRON, *TORCH_DIST), **pairs, **SAVED)
    yield Case(
        name="megatron preferences", flags=("--loss-type", "dpo_loss", "--lr", "1e-3"), only=DISTRIBUTED, **pairs
    )
    taught = ("--loss-type", "sft_loss", "--no-rm-type", "--n-samples-per-prompt", "1", "--lr", "1e-3")
    pairs["task"] = "answers"
    yield Case(name="megatron demonstrations", flags=taught, only=DISTRIBUTED, **pairs)


# -- the inputs and the command line of a case ----------------------------------------------


def write_model(case: Case, folder: Path) -> Path:
    """Write model and data of a case."""
    from tests.launch.small_run import write_inputs

    if case.task == "images":
        from tests.launch.test_image_runs import write_rows
        from tests.models.small_vision import write_vision_checkpoint

        folder.mkdir(parents=True)
        write_rows(folder)
        return write_vision_checkpoint(folder, case.kind)
    if case.kind == "blocks":
        from tests.backends.megatron.test_packed_cli import write_blocks

        return write_blocks(folder)
    inputs = write_inputs(folder, moe=case.kind == "moe")
    if case.kind == "mimo":
        from tests.models.draft.mtp_checkpoints import make_reference, save_reference

        save_reference(make_reference("mimo", vocab_size=28, eos_token_id=27, pad_token_id=27), inputs)
    elif case.kind not in ("dense", "moe"):
        from tests.launch.test_family_runs import ids_of
        from tests.models.oracle import hf_model

        changes: dict[str, Any] = ids_of(inputs) | dict(case.config)
        hf_model(case.kind, **changes).save_pretrained(inputs)
    if case.task == "pairs":
        from tests.launch.test_preference_runs import write_pairs

        words = [json.loads(line)["input"] for line in (inputs / "train.jsonl").read_text().splitlines()]
        write_pairs(inputs / "pairs.jsonl", words)
    return inputs


def build_line(case: Case, inputs: Path, run: Path, device: str) -> list[str]:
    """Return the words of `miles train` without the flags of the case."""
    from tests.launch.small_run import flags

    if case.task == "words":
        line = flags(inputs, run, "--engine-kv-tokens", "4096", steps=case.steps)
        line[line.index("--device") + 1] = device
        return line if device == "cpu" else drop_option(line, "--num-threads")
    line = ["--hf-checkpoint", str(inputs), "--save", str(run), "--num-rollout", str(case.steps), "--view", "plain"]
    line += ["--device", device, "--apply-chat-template", "--save-interval", "2"]
    if case.task == "pairs":
        return [*line, "--prompt-data", str(inputs / "pairs.jsonl"), "--rollout-batch-size", "8"]
    if case.task == "answers":
        data = ("--prompt-data", str(inputs / "train.jsonl"), "--label-key", "label")
        return [*line, *data, "--rollout-batch-size", "8"]
    line += ["--prompt-data", str(inputs / "data.jsonl"), "--multimodal-keys", '{"image": "images"}']
    line += ["--label-key", "label", "--rm-type", "f1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]
    line += ["--rollout-max-response-len", "6", "--lr", "1e-3", "--entropy-coef", "0.1"]
    return [*line, "--engine-kv-tokens", "4096"]


def drop_option(words: list[str], name: str) -> list[str]:
    at = words.index(name)
    return words[:at] + words[at + 2 :]


# -- processes ------------------------------------------------------------------------------


@dataclass
class Attempt:
    """The processes of one case, which end by ``deadline``, and what they said."""

    device: str
    on_cpu: bool
    deadline: float
    said: list[str] = field(default_factory=list)

    def miles(self, *words: str) -> None:
        """Run ``miles`` to its end; RuntimeError with its last line if it fails."""
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        if self.on_cpu:
            shim = ROOT / "tests" / "backends" / "megatron" / "cpu"
            paths = os.pathsep.join([str(shim), str(ROOT / "src"), str(ROOT), env.get("PYTHONPATH", "")])
            env |= {"PYTHONPATH": paths, "MILES_TEST_MEGATRON": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "miles.launch.main", *words]
        began = time.perf_counter()
        # Files, as a server that outlives its run would keep a pipe open.
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as failed:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=failed, start_new_session=True)
            in_time = wait_or_end(process, max(1.0, self.deadline - time.perf_counter()))
            out, err = (read_from_start(file) for file in (said, failed))
        err += "" if in_time else "\nnot finished in time"
        seconds = time.perf_counter() - began
        self.said.append(f"$ {' '.join(command)}\n\n{out}\n{err}\nexit {process.returncode} after {seconds:.0f} s\n")
        if process.returncode or not in_time:
            raise RuntimeError(find_last_line(err) or find_last_line(out))


def wait_or_end(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a process, or end it with its ranks and engines after so long; whether it has ended in time."""
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return False


def read_from_start(file: IO[bytes]) -> str:
    """Return all that was written to a file."""
    file.seek(0)
    return file.read().decode(errors="replace")


def find_last_line(text: str) -> str:
    """Return the last line that is an error, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("error")]
    return (errors or lines or [""])[-1][:300]


def read_rows(run: Path) -> list[dict[str, Any]]:
    """Return what the steps of a run report."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


# -- checks ---------------------------------------------------------------------------------


def check(case: Case, root: Path, device: str, seconds: float) -> tuple[bool, str, list[str]]:
    """Return whether the case passes, the figures of its line, and what its processes said."""
    folder = root / case.name.replace(" ", "_")
    began = time.perf_counter()
    attempt = Attempt(device, device == "cpu" and case.is_megatron, began + seconds)
    figures: list[str] = []
    try:
        with _SEEDED:
            inputs = write_model(case, folder / "model")
        good = True
        for passed, said in check_run(case, attempt, inputs, folder):
            good &= passed
            figures.append(said)
    except Exception as error:
        good = False
        figures.append(f"{type(error).__name__}: {error}")
    return good, f"{', '.join(figures)}, {time.perf_counter() - began:.0f} s", attempt.said


def check_run(case: Case, attempt: Attempt, inputs: Path, folder: Path) -> Iterator[tuple[bool, str]]:
    """Train, and yield for each comparison whether it passes, and its figures."""
    run, flags = folder / "run", [word.format(model=inputs) if word == "{model}" else word for word in case.flags]
    line = [*build_line(case, inputs, run, attempt.device), *flags, *case.only]
    if case.stopped:
        attempt.miles("train", *line, "--debug-exit-after-rollout", "1")
    attempt.miles("train", *line)
    rows = read_rows(run)
    assert len(rows) == case.steps, f"{len(rows)} steps of {case.steps} are in {run / 'metrics.jsonl'}"
    moved = [row["step"] for row in rows if not (math.isfinite(row["loss"]) and row.get("grad_norm", 0) > 0)]
    if moved:
        yield False, f"no finite gradient in steps {moved}"
    if case.task in ("words", "images"):
        yield compare_planes(case, rows)
    if case.as_fsdp:
        attempt.miles("train", *build_line(case, inputs, folder / "fsdp", attempt.device), *flags)
        yield compare_rows("as fsdp", rows, read_rows(folder / "fsdp"))
    if case.resumed:
        words = build_line(case, inputs, folder / "again", attempt.device)
        words += [*flags, *case.only, "--load", str(run / "checkpoints" / f"step-{case.steps - 1:06d}")]
        attempt.miles("train", *words)
        good, said = compare_rows("resumed", read_rows(folder / "again"), rows[-1:])
        yield good or "bf16" in case.name, said  # where another batch may round to another token
    if case.converted:
        last = run / "checkpoints" / f"step-{case.steps:06d}"
        attempt.miles("convert", str(last), str(folder / "converted"), "--format", "float32")
        yield compare_tensors(inputs, folder / "converted")


def compare_planes(case: Case, rows: Sequence[dict[str, Any]]) -> tuple[bool, str]:
    """Compare the log-probs of engine and trainer."""
    largest = max((row["parity_max_abs"] for row in rows if "parity_max_abs" in row), default=float("nan"))
    mean = max((row["parity_mean_abs"] for row in rows if "parity_mean_abs" in row), default=float("nan"))
    drafts = [row["draft_loss"] for row in rows if "draft_loss" in row]
    drafted = f", draft loss {drafts[0]:.2f} to {drafts[-1]:.2f}" if drafts else ""
    return largest <= case.tolerance, f"largest {largest:.1e}, mean {mean:.1e}{drafted}"


COMPARED = ("loss", "grad_norm", "reward", "kl", "value_loss", "draft_loss", "teacher_logp")


def compare_rows(name: str, found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> tuple[bool, str]:
    """Compare what two runs report of the same steps; sums in another order may differ in rounding."""
    if [row["step"] for row in found] != [row["step"] for row in wanted]:
        return False, f"{name}: steps {[row['step'] for row in found]}, not {[row['step'] for row in wanted]}"
    apart = {
        key: abs(one[key] - other[key]) / max(abs(other[key]), 0.01)
        for one, other in zip(found, wanted, strict=True)
        for key in COMPARED
        if key in other
    }
    worst = max(apart, key=lambda key: apart[key])
    said = "to the bit" if not apart[worst] else f"{worst} {apart[worst]:.1e}"
    return apart[worst] < 0.01, f"{name} {said}"


def compare_tensors(before: Path, after: Path) -> tuple[bool, str]:
    """Compare the names in two Hugging Face folders; some tensors must have been trained."""
    import torch
    from safetensors.torch import load_file

    one, two = (
        {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        for folder in (before, after)
    )
    missing = sorted(one.keys() - two.keys())
    bad = sorted(name for name, tensor in two.items() if not tensor.isfinite().all())
    changed = sum(not torch.equal(two[name].float(), one[name].float()) for name in one.keys() & two.keys())
    if missing or bad or not changed:
        return False, f"converted without {missing[:1]}, not finite {bad[:1]}, {changed} changed"
    return True, f"converted, {changed} of {len(two)} changed"


def read_samples(result: bytes) -> Iterator[tuple[list[int], list[float]]]:
    """Tokens and log-probs of the sequences in a sampling result."""
    from miles.backends.service.protobuf import read_fields

    for number, value in read_fields(result):
        if number == 1 and isinstance(value, bytes):
            sequence = {key: part for key, part in read_fields(value) if isinstance(part, bytes)}
            yield np.frombuffer(sequence[2], np.int32).tolist(), np.frombuffer(sequence[3], np.float32).tolist()


def check_service(root: Path, device: str) -> tuple[bool, str, list[str]]:
    """An adapter of all layers and the output layer, trained over HTTP: what it samples, and what a pass says of it."""
    from tests.backends.service.live import ALICE, serving
    from tests.backends.service.raw import Raw, read_loss

    from miles.launch.commands import demo_task

    model = root / "service model"
    model.mkdir(parents=True)
    demo_task.write_checkpoint(model, moe=False, seed=1)
    prompt = [5, 17, 20, 24, 8, 9]
    with serving(model, root / "service", "--service-max-rank", "8", "--device", device) as live:
        client = Raw(live.url, ALICE)
        run = client.open_run(str(model))
        losses = []
        for step in range(4):
            losses.append(read_loss(client.result(client.train(run, 2 * step + 1, [[*prompt, 12, 7, 3]]))))
            client.result(client.step(run, 2 * step + 2))
        saved = client.post("save_weights_for_sampler", model_id=run, seq_id=9, sampling_session_seq_id=0)
        sampler = client.result(saved)["sampling_session_id"]
        body = {
            "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 8, "seed": 3},
            "num_samples": 4,
        }
        sampled = client.result(client.post("asample", sampling_session_id=sampler, seq_id=0, **body))
        gaps = []
        for number, (tokens, logprobs) in enumerate(read_samples(sampled)):
            whole = [*prompt, *tokens]
            passed = read_loss(client.result(client.train(run, 10 + 2 * number, [whole], forward_only=True)))
            before = read_loss(client.result(client.train(run, 11 + 2 * number, [prompt], forward_only=True)))
            gaps.append(abs(before - passed - sum(logprobs)) / len(tokens))
    figures = f"loss {losses[0]:.3f} to {losses[-1]:.3f}, sampled against a pass {max(gaps):.1e} a token"
    return losses[-1] < losses[0] and max(gaps) < TOLERANCE, figures, []


# -- all cases ------------------------------------------------------------------------------


def parse_words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--limit-seconds", type=float, default=LIMIT_SECONDS, help="of one case")
    parser.add_argument("--begin-seconds", type=float, default=math.inf, help="no case begins after so many")
    parser.add_argument("--logs", type=Path, help="folder for what the processes of failed cases said")
    return parser.parse_args()


def main() -> None:
    args = parse_words()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    cases = [case for case in list_cases() if not args.words or any(word in case.name for word in args.words)]
    began = time.perf_counter()

    def run(case: Case | None, root: Path) -> tuple[bool, str, list[str]]:
        if time.perf_counter() - began > args.begin_seconds:
            return False, "not begun", []
        if case is None:
            return check_service(root, args.device)
        return check(case, root, args.device, args.limit_seconds)

    passed = total = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:
        jobs = {pool.submit(run, case, Path(folder)): case.name for case in cases}
        if not args.words or any(word in "service" for word in args.words):
            jobs[pool.submit(run, None, Path(folder))] = "service"
        for job in as_completed(jobs):
            total += 1
            try:
                good, figures, said = job.result()
            except Exception as error:
                good, figures, said = False, f"{type(error).__name__}: {error}", []
            passed += good
            print(f"{'ok  ' if good else 'FAIL'} {jobs[job]:48} {figures}", flush=True)
            if args.logs is not None and not good:
                args.logs.mkdir(parents=True, exist_ok=True)
                (args.logs / f"{jobs[job].replace(' ', '_')}.log").write_text("\n".join([figures, *said]))
    print(f"{passed} of {total} cases passed in {time.perf_counter() - began:.0f} s")
    sys.exit(passed != total)


if __name__ == "__main__":
    main()
