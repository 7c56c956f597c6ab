"""The client's own types: what it may send and receive is what the service was written for, so that drift is seen.

``tinker_types.txt`` lists the fields of all types of the supported version. When the client changes, run this file with
--regenerate, review the difference, and change the service or ``NOT_OFFERED`` accordingly.
"""

import dataclasses
import re
import typing
from pathlib import Path

import numpy as np
import pytest

from miles.backends.service.http_server import NOT_OFFERED, SUPPORTED_CLIENT
from miles.backends.service.losses import LOSSES
from miles.backends.service.messages import (
    SampledTokens,
    TopTokens,
    decode_train_request,
    encode_array_record,
    encode_sample_result,
    encode_train_result,
)
from miles.rollout.serving.errors import RequestError

tinker = pytest.importorskip("tinker", reason="pip install 'miles-rl[service]'")

from tinker import types  # noqa: E402
from tinker.proto import request_conv, response_conv, tinker_public_pb2  # noqa: E402

LIST = Path(__file__).with_name("tinker_types.txt")
PACKAGE = Path(tinker.__file__).parent
# Endpoints of programs beside the client library: its command line's.
PROGRAMS = {"/api/v1/auth/apikey/me"}


def test_the_supported_version_is_the_one_that_is_tested():
    assert tinker.__version__ == SUPPORTED_CLIENT


def list_types():
    for name in sorted(vars(types)):
        kind = getattr(types, name)
        if not isinstance(kind, type):
            continue
        if hasattr(kind, "model_fields"):
            fields = kind.model_fields
            yield from (f"{name}.{field}{'' if info.is_required() else ' = default'}" for field, info in fields.items())
        elif dataclasses.is_dataclass(kind):
            yield from (f"{name}.{field.name}" for field in dataclasses.fields(kind))
    for name, message in sorted(tinker_public_pb2.DESCRIPTOR.message_types_by_name.items()):
        yield from (f"protobuf {name}.{field.name} = {field.number}" for field in message.fields)


def test_the_generated_list_of_types_is_up_to_date(regenerate: bool):
    lines = list(list_types())
    if regenerate:
        LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert LIST.read_text(encoding="utf-8").splitlines() == lines


def list_endpoints():
    """Every path in the client's source, names in braces being anything."""
    for file in PACKAGE.rglob("*.py"):
        if not file.name.endswith("_test.py"):
            for path in re.findall(r'f?"(/api/v1/[^"]*)"', file.read_text(encoding="utf-8")):
                yield re.sub(r"\{[^}]*\}", "{}", path)


def test_every_endpoint_of_the_client_is_served_or_refused(live):
    app = live.server._runner.app
    own = {re.sub(r"\{[^}]*\}", "{}", route.resource.canonical) for route in app.router.routes()}
    # The client's name of a checkpoint has two parts.
    own |= {path.replace("checkpoints/{}/{}", "checkpoints/{}") for path in own}
    called = set(list_endpoints()) - PROGRAMS
    assert len(called) > 30
    assert called <= own
    assert {re.sub(r"\{[^}]*\}", "{}", path) for path in NOT_OFFERED} - PROGRAMS <= called


def test_every_loss_of_the_client_is_served_or_refused():
    assert set(typing.get_args(types.LossFnType)) == {*LOSSES, "stable_reinforce", "custom"}


def test_training_requests_are_read_as_the_client_writes_them():
    sparse = types.TensorData.from_torch_sparse(_sparse_tensor())
    assert sparse.sparse_crow_indices is not None
    data = [
        types.Datum(
            model_input=types.ModelInput(
                chunks=[types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[70000])]
            ),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 0.5, 1.0]},
        ),
        types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
            loss_fn_inputs={"target_tokens": sparse, "advantages": np.zeros((4, 9), np.float32)},
        ),
    ]
    inner = types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config={"beta": 0.25, "name": "x"})
    message = request_conv.forward_backward_request_to_proto(
        types.ForwardBackwardRequest(forward_backward_input=inner, model_id="run", seq_id=7)
    )
    message.forward_only = True
    found = decode_train_request(message.SerializeToString())
    assert (found.model_id, found.seq_id, found.loss_fn, found.forward_only) == ("run", 7, "ppo", True)
    assert found.loss_config == {"beta": 0.25, "name": "x"}
    assert found.data[0].tokens_N.tolist() == [1, 2, 70000]
    assert found.data[0].inputs["weights"].tolist() == [0.0, 0.5, 1.0]
    assert found.data[1].inputs["target_tokens"].tolist() == _sparse_tensor().tolist()
    assert found.data[1].inputs["advantages"].shape == (4, 9)


def _sparse_tensor():
    import torch

    tensor = torch.zeros(4, 9, dtype=torch.int64)
    tensor[1, 3], tensor[3, 8] = 5, 6
    return tensor


def test_other_input_than_tokens_is_refused():
    datum = types.Datum(model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]))
    inner = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=inner, model_id="run", seq_id=1)
    with pytest.raises(RequestError, match="not text"):
        decode_train_request(request_conv.forward_backward_request_to_proto(request).SerializeToString())


def test_results_are_read_by_the_client_as_they_were_written():
    outputs = [{"logprobs": np.array([-1.0, -2.0], np.float32)}, {"logprobs": np.array([-3.0], np.float32)}]
    wide = [{"logprobs": np.ones((2, 3), np.float32)}]
    body = encode_train_result([encode_array_record(outputs), encode_array_record(wide)], {"loss:sum": 1.5})
    found = response_conv.deserialize_forward_backward_output(body)
    assert found.metrics == {"loss:sum": 1.5}
    assert [each["logprobs"].shape for each in found.loss_fn_outputs] == [[2], [1], [2, 3]]
    assert found.loss_fn_outputs[0]["logprobs"].tolist() == [-1.0, -2.0]
    top = TopTokens(positions=[[(4, -0.5), (5, -1.5)], []], k=2)
    body = encode_sample_result(
        [SampledTokens(tokens=[7, 8], logprobs=[-0.1, -0.2], stopped=True, top=top)],
        prompt_logprobs=[None, -0.25],
        top_prompt=top,
        target_logprobs=np.array([[1.0, 2.0]], np.float32),
        cached_tokens=3,
    )
    sampled = response_conv.deserialize_sample_response(body)
    assert sampled.sequences[0].tokens == [7, 8] and sampled.sequences[0].stop_reason == "stop"
    assert sampled.sequences[0].topk_logprobs == [[(4, -0.5), (5, -1.5)], None]
    assert sampled.prompt_logprobs == [None, -0.25] and sampled.prompt_cache_hit_tokens == 3
    assert sampled.topk_prompt_logprobs == [[(4, -0.5), (5, -1.5)], None]
    assert sampled.target_prompt_logprobs.tolist() == [[1.0, 2.0]]
