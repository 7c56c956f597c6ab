"""Sampling of the training service on a GPU: adapters of eight tenants at once, and the base, with the tinker client.

    PYTHONPATH=src:. python benchmarks/bench_service_sampling.py [--model Qwen3-0.6B] [--tenants 8]
    PYTHONPATH=src:. python benchmarks/bench_service_sampling.py --model tiny --samples 2 --tokens 8        # a CPU

Starts ``miles serve MODEL --train`` on random weights of the published shape. Every tenant trains an adapter of rank 16
for one step on data of its own, saves it and samples from it, through the official client: ``--prompts`` prompts of 256
tokens with ``--samples`` samples of ``--tokens`` tokens each, all tenants at once. Then the same prompts are sampled
from the base model. Of some samples the log-probs are computed by the trainer, with the tenant's adapter, and by the
engine (``compute_logprobs``): the differences are printed. The limit of an adapter's speed is the base model's.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

PROMPT_TOKENS, RANK = 256, 16
START_SECONDS = 240.0


def write_model(model: str, folder: Path) -> None:
    """The model, with the tokenizer of a small one, since prompts are tokens."""
    from tests.backends.native.server.tiny import write_model as write_tiny_model

    if model == "tiny":
        write_tiny_model(folder)
        return
    from benchmarks.random_checkpoint import write_random_checkpoint

    write_random_checkpoint(model, folder)
    tiny = write_tiny_model(folder.with_name("tiny"))
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, folder)


@contextmanager
def serve(folder: Path, state: Path, tenants: int) -> Iterator[str]:
    """The service, with a key for each tenant; yields its address."""
    keys = state / "tenants.toml"
    keys.write_text("".join(f'[tenants.tenant{i}]\nkey = "{make_key(i)}"\n' for i in range(tenants)))
    keys.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "miles.launch.main", "serve", str(folder), "--train", "--port", str(port)]
    command += ["--service-directory", str(state / "service"), "--service-tenants", str(keys)]
    command += ["--max-loras-per-batch", str(tenants), "--service-max-rank", str(RANK)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:], flush=True)
            raise
        finally:
            process.terminate()
            process.wait(60)


def make_key(tenant: int) -> str:
    return f"tml-benchmark-tenant-{tenant:04d}"


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "the service has ended"
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise TimeoutError("the service did not start in time")


class TenantLoop:
    """One tenant: its training client, its prompts, and a sampler of its adapter."""

    def __init__(self, url: str, number: int, args: argparse.Namespace) -> None:
        import tinker

        self._types = tinker.types
        self._args = args
        chance = random.Random(number)
        client = tinker.ServiceClient(base_url=url, api_key=make_key(number))
        (found,) = client.get_server_capabilities().supported_models
        assert found.model_name is not None
        self._training = client.create_lora_training_client(base_model=found.model_name, rank=RANK, seed=number)
        self.prompts = [
            [chance.randrange(1, args.vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(args.prompts)
        ]
        for _ in range(args.steps):
            self._training.forward_backward([self._datum(prompt) for prompt in self.prompts], "cross_entropy")
            self._training.optim_step(tinker.types.AdamParams(learning_rate=1e-3)).result()
        self.adapted = self._training.save_weights_and_get_sampling_client()
        self.base = client.create_sampling_client(base_model=found.model_name)

    def _datum(self, tokens: list[int]) -> Any:
        inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
        return self._types.Datum(model_input=self._types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    def sample(self, sampler: Any, tokens: int) -> list[list[Any]]:
        """The samples of every prompt."""
        params = self._types.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[], seed=1)
        futures = [
            sampler.sample(
                prompt=self._types.ModelInput.from_ints(prompt), num_samples=self._args.samples, sampling_params=params
            )
            for prompt in self.prompts
        ]
        return [future.result().sequences for future in futures]

    def compare(self, sequences: list[Any]) -> tuple[float, float]:
        """Mean differences of log-probs of the first prompt's samples: sampled to trained, sampled to scored."""
        trained, scored = list[float](), list[float]()
        prompt = self.prompts[0]
        texts = [[*prompt, *sequence.tokens] for sequence in sequences]
        results = self._training.forward([self._datum(text) for text in texts], "cross_entropy").result()
        futures = [self.adapted.compute_logprobs(self._types.ModelInput.from_ints(text)) for text in texts]
        for sequence, output, future in zip(sequences, results.loss_fn_outputs, futures, strict=True):
            sampled = np.array(sequence.logprobs)
            trained += np.abs(np.array(output["logprobs"].data)[len(prompt) - 1 :] - sampled).tolist()
            scored += np.abs(np.array(future.result()[len(prompt) :], np.float64) - sampled).tolist()
        return float(np.mean(trained)), float(np.mean(scored))


def measure_sampling(
    tenants: list[TenantLoop], side: str, tokens: int, pool: ThreadPoolExecutor
) -> tuple[float, list[list[list[Any]]]]:
    """Seconds of the faster of two rounds of all tenants at once, behind a short one, and the samples of the last."""
    seconds, done = list[float](), list[list[list[Any]]]()
    for length in (4, tokens, tokens):
        began = time.perf_counter()
        done = list(pool.map(lambda tenant, n=length: tenant.sample(getattr(tenant, side), n), tenants))
        seconds.append(time.perf_counter() - began)
    assert all(len(sequence.tokens) == tokens for tenant in done for group in tenant for sequence in group)
    return min(seconds[1:]), done


def measure(url: str, args: argparse.Namespace) -> None:
    with ThreadPoolExecutor(args.tenants) as pool:
        began = time.perf_counter()
        tenants = list(pool.map(lambda number: TenantLoop(url, number, args), range(args.tenants)))
        print(f"{args.tenants} adapters trained and saved in {time.perf_counter() - began:.1f} s", flush=True)
        rates: dict[str, float] = {}
        found: list[list[list[Any]]] = []
        count = args.tenants * args.prompts * args.samples
        for side in ("adapted", "base"):
            seconds, done = measure_sampling(tenants, side, args.tokens, pool)
            found = done if side == "adapted" else found
            rates[side] = count * args.tokens / seconds
            print(f"{side}: {count} samples of {args.tokens} tokens, {rates[side]:,.0f} tok/s", flush=True)
        print(f"adapters at {100 * rates['adapted'] / rates['base']:.1f} % of the base model", flush=True)
        pairs = list(pool.map(lambda tenant, groups: tenant.compare(groups[0]), tenants, found))
    trained, scored = (max(column) for column in zip(*pairs, strict=True))
    print(f"mean |difference of log-probs|, worst tenant: sampled to trained {trained:.2e}, to scored {scored:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-0.6B")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each tenant")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=1, help="updates of each adapter before it is sampled from")
    args = parser.parse_args()
    args.vocabulary = 200 if args.model == "tiny" else 10_000
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    with tempfile.TemporaryDirectory() as folder:
        write_model(args.model, Path(folder, "model"))
        with serve(Path(folder, "model"), Path(folder), args.tenants) as url:
            measure(url, args)


if __name__ == "__main__":
    main()
