"""``miles parity`` with SGLang on one side: a server that is asked, one that is started, and what it writes down."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch.parity.test_command import CPU, compared, model_of
from tests.models.oracle import hf_model
from tests.server_api.live_servers import PYTHON, STUB
from tests.server_api.tiny import make

from miles.backends.remote import sglang_dumps
from miles.core.errors import EngineError
from miles.core.routed_experts import encode_for_sglang
from miles.launch.main import main
from miles.launch.parity.backends import get_backend
from miles.launch.parity.diff import compare, describe_difference, describe_not_compared
from miles.models.activation_hooks import ActivationTrace
from miles.models.checkpoint import hf
from miles.models.resolve import resolve_spec


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "experts", 2, experts=True)


# -- a server that runs already -------------------------------------------------------------


@contextmanager
def answering(answer) -> Iterator[str]:
    """A server that answers /generate; ``answer`` gives the status and what is said of the prompt."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            status, reported = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(reported).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def oracle_of(kind: str, *tells: str):
    """transformers behind SGLang's API, started to tell some things and not others."""
    oracle = hf_model(kind)

    def answer(asked):
        assert asked["return_logprob"] and asked["logprob_start_len"] == 0
        if asked.get("return_hidden_states") and "describe_not_compared" not in tells:
            return 400, {"error": {"message": "The server is not configured to return describe_not_compared states."}}
        ids = torch.tensor(asked["input_ids"])
        with torch.no_grad():
            out = oracle(ids[None], output_hidden_states=True, output_router_logits="experts" in tells)
        scores = out.logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
        lines = [[None, int(ids[0]), None], *([s, int(i), None] for s, i in zip(scores, ids[1:], strict=True))]
        meta: dict[str, Any] = {"input_token_logprobs": lines}
        if "describe_not_compared" in tells and asked.get("return_hidden_states"):
            meta["hidden_states"] = [out.hidden_states[-1][0].tolist()]
        if "experts" in tells and asked.get("return_routed_experts"):
            picked = [logits.topk(oracle.config.num_experts_per_tok).indices for logits in out.router_logits]
            meta["routed_experts"] = encode_for_sglang(torch.stack(picked, 1).numpy().astype(np.uint8))
        return 200, {"meta_info": meta}

    return answer


@pytest.mark.parametrize(
    ("kind", "tells", "seen"),
    [
        ("qwen3", (), {"log-probs"}),
        ("qwen3", ("describe_not_compared",), {"log-probs", "final norm"}),
        ("qwen3 moe normalised", ("describe_not_compared", "experts"), {"log-probs", "final norm", "experts"}),
        ("qwen3 moe normalised", ("experts",), {"log-probs", "experts"}),
    ],
)
def test_a_server_is_compared_by_all_that_it_tells(tmp_path, capsys, kind, tells, seen):
    hf_model(kind).save_pretrained(tmp_path)
    with answering(oracle_of(kind, *tells)) as url:
        found = compared(tmp_path, "fsdp", url)
        assert main(["parity", str(tmp_path), "--b", url, "--device", "cpu"]) == 0
    assert found.first(5e-5) is None, describe_difference(found, a="fsdp", b=url, tolerance=5e-5)
    assert {gap.place[1] for gap in found.gaps} == seen
    said = capsys.readouterr().out
    assert "Not compared, since only one backend records it: embedding, norm, qkv, rotation, attention, output" in said


@pytest.mark.parametrize(
    ("expected", "complaint"),
    [
        ((500, {}), "/generate request failed: HTTP Error 500"),
        ((400, {}), "/generate request failed: HTTP Error 400"),
        ((200, []), "/generate does not reply like SGLang"),
        ((200, {"meta_info": {}}), "returned no prompt log-probs from /generate"),
        ((200, {"meta_info": {"input_token_logprobs": [[None, 1, None]]}}), "returned 0 log-probs for 19 tokens"),
    ],
)
def test_a_server_that_answers_otherwise_is_told_in_one_sentence(experts, expected, complaint):
    with answering(lambda _: expected) as url, pytest.raises(EngineError, match=complaint):
        compared(experts, "fsdp", url)


# -- what a server writes down --------------------------------------------------------------


def written(folder: Path, trace: dict, spec, sequences, *, step: int) -> list[Path]:
    """The readings of another as SGLang would have written them, ``step`` tokens a file, after a file of its own."""
    folder.mkdir()
    torch.save({"model.forward_batch_info.input_ids": torch.zeros(1, dtype=torch.int64)}, folder / "Pass00000.pt")
    layers, number, start = spec.num_layers, 1, 0
    for tokens in sequences:
        for first in range(0, len(tokens), step):
            last = min(first + step, len(tokens))
            rows = slice(start + first, start + last)
            reported: dict[str, Any] = {"model.embed_tokens": trace[-1, "embedding"][rows]}
            for i in range(layers):
                at = f"model.layers.{i}"
                stream = trace[i - 1, "residual"][rows] if i else None
                normed = trace[i, "norm"][rows]
                reported[f"{at}.input_layernorm"] = normed if stream is None else [normed, stream]
                reported[f"{at}.self_attn.qkv_proj"] = trace[i, "qkv"][rows]
                reported[f"{at}.self_attn.rotary_emb"] = list(trace[layers - 1, "rotation"][rows].split((32, 16), -1))
                reported[f"{at}.self_attn.attn"] = trace[i, "attention"][rows]
                reported[f"{at}.self_attn.o_proj"] = trace[i, "output"][rows]
                reported[f"{at}.post_attention_layernorm"] = [trace[i, "mlp norm"][rows], trace[i, "mlp norm"][rows]]
                reported[f"{at}.mlp.gate"] = trace[i, "router"][rows]
                reported[f"{at}.mlp.topk"] = [trace[i, "gates"][rows], trace[i, "experts"][rows].int()]
            reported["model.norm"] = [trace[layers, "final norm"][rows], trace[layers - 1, "residual"][rows]]
            reported["model.forward_batch_info.input_ids"] = torch.from_numpy(tokens[first:last].astype(np.int64))
            reported["model.forward_batch_info.positions"] = torch.arange(first, last)
            torch.save(reported, folder / f"Pass{number:05d}.pt")
            number += 1
        start += len(tokens)
    return sglang_dumps.list_steps(folder)


def test_what_a_server_wrote_is_read_under_our_names_whatever_its_steps(experts, tmp_path):
    spec, model = resolve_spec(experts, "native"), model_of(experts)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, spec.vocab_size, n).astype(np.int32) for n in (19, 5, 8)]
    reported = dict(get_backend("fsdp")(model, sequences))
    for step in (64, 7):
        steps, trace = written(tmp_path / str(step), reported, spec, sequences, step=step), ActivationTrace()
        sglang_dumps.read_dumps(steps, spec, sequences, trace)
        found = compare(reported, trace.concatenate(), layers=spec.num_layers)
        assert all(gap.equal for gap in found.gaps) and len(found.gaps) == 21
        assert describe_not_compared(found) == [
            "Not compared, since only one backend records it: rotation (in 1 of 2 layers), mlp, logits, log-probs."
        ]
    with pytest.raises(EngineError, match="SGLang dumped 14 of 19 tokens"):
        sglang_dumps.read_dumps(steps[:3], spec, sequences, ActivationTrace())


# -- a server that is started ---------------------------------------------------------------


@pytest.mark.skipif(find_spec("sglang") is not None, reason="sglang is installed here")
def test_the_interpreter_that_has_sglang_is_asked_for(experts, capsys):
    assert main(["parity", str(experts), "--a", "sglang", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "name an interpreter that has it with --sglang-python" in said and said.count("\n") == 1


def test_a_server_that_does_not_start_is_told_with_its_last_words(experts, tmp_path, capsys):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named sglang\nexit 3\n")
    python.chmod(0o755)
    line = ["parity", str(experts), "--a", "sglang", "--device", "cpu", "--sglang-python", str(python)]
    assert main(line) == 1
    said = capsys.readouterr().err
    assert "sglang ended with exit code 3 while it started" in said and "no module named sglang" in said


@pytest.mark.sglang
@pytest.mark.slow
def test_stock_sglang_agrees_with_the_trainer_and_a_weight_that_is_off_is_found(experts, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={STUB} OMP_NUM_THREADS=1 exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    model = model_of(experts, sglang_python=str(python))
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.spec.vocab_size, n).astype(np.int32) for n in (19, 5, 8)]
    reported, trainer = get_backend("sglang", sglang_python=str(python))(model, sequences), get_backend("fsdp")
    found = compare(reported, trainer(model, sequences), layers=2)
    assert found.first(5e-5) is None, describe_difference(found, a="sglang", b="fsdp", tolerance=5e-5)
    unseen = {place for place in found.not_compared if place[1] != "logits"}
    assert unseen == {(0, "rotation"), (0, "mlp"), (1, "mlp")}
    for name, place in {
        "layers.1.attention_norm.weight": (1, "norm"),
        "layers.0.attention.qkv.weight": (0, "qkv"),
        "layers.1.attention.q_norm.weight": (1, "rotation"),
        "layers.0.attention.q_norm.weight": (0, "attention"),
        "layers.0.attention.output.weight": (0, "output"),
        "layers.1.moe.router.weight": (1, "router"),
        "layers.0.moe.down": (0, "residual"),
        "norm.weight": (2, "final norm"),
    }.items():
        decoder = hf.load(experts, device=CPU, dtype=torch.float32)
        with torch.no_grad():
            decoder.get_parameter(name).mul_(1.01)
        hf.export(decoder, tmp_path / name, like=experts)
        first = compare(reported, trainer(model_of(tmp_path / name), sequences), layers=2).first(1e-4)
        assert first is not None and first.place == place, name
