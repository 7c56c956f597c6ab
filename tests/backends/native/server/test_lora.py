"""Adapters over HTTP: requests choose one by SGLang's and OpenAI's fields, endpoints load, update and unload them."""

import asyncio
import base64
import hashlib

import pytest
import safetensors.torch
import torch
from tests.backends.native.lora_adapters import merged_model, random_adapter, random_factors, save_adapter
from tests.backends.native.server.live import GREEDY, PROMPT, served
from transformers import Qwen3ForCausalLM

from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.runner.lora import list_served_modules
from miles.cluster.executor import ThreadExecutor
from miles.core.errors import UsageError
from miles.kernels.numerics import FAST
from miles.launch.commands.serve import build_server, read_serve_config
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config

STRONG = {"scale": 0.4, "rank": 4}


@pytest.fixture(scope="module")
def spec(folder):
    return spec_from_config(read_config(folder))


@pytest.fixture(scope="module")
def shape(spec):
    return LoraShape(num_slots=2, max_rank=8, modules=list_served_modules(spec, (), FAST))


@pytest.fixture(scope="module")
def greedy(folder, spec):
    """The tokens that transformers writes with an adapter in its weights."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def write(seed=None, count=8):
        factors = None if seed is None else random_factors(spec, seed, **STRONG)
        tokens = list(PROMPT)
        merged = merged_model(model, factors)
        for _ in range(count):
            tokens.append(int(merged(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == 2:
                break
        return tokens[len(PROMPT) :]

    return write


def as_tensors(spec, name, seed, **more):
    config, tensors = random_adapter(spec, seed, **STRONG)
    content = base64.b64encode(safetensors.torch.save(tensors)).decode()
    return {
        "lora_name": name,
        "config_dict": config,
        "serialized_tensors": content,
        "load_format": "safetensors",
    } | more


@pytest.mark.endpoint("/load_lora_adapter")
@pytest.mark.endpoint("/load_lora_adapter_from_tensors")
@pytest.mark.endpoint("/unload_lora_adapter")
def test_requests_get_the_adapter_they_name(folder, spec, shape, greedy, tmp_path):
    path = str(save_adapter(tmp_path / "first", spec, 1, **STRONG))
    wanted = {name: greedy(seed) for name, seed in ((None, None), ("first", 1), ("second", 2))}
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3

    async def story(live):
        status, reply = await live.post("/load_lora_adapter", {"lora_name": "first", "lora_path": path})
        assert status == 200 and reply["success"] and reply["error_message"] is None
        first = reply["loaded_adapters"]["first"]
        assert (first["lora_name"], first["lora_path"], first["pinned"]) == ("first", path, False)
        status, reply = await live.post("/load_lora_adapter_from_tensors", as_tensors(spec, "second", 2))
        assert status == 200 and set(reply["loaded_adapters"]) == {"first", "second"}, reply
        for name in ("first", "second", None):
            assert (await live.generate(lora_path=name))["output_ids"] == wanted[name]
        names = ["second", None, "first"]
        replies = await live.generate(input_ids=[PROMPT] * 3, lora_path=names)
        assert [each["output_ids"] for each in replies] == [wanted[name] for name in names]
        _, listed = await live.get("/v1/models")
        assert [(model["id"], model["parent"]) for model in listed["data"]] == [
            ("tiny", None),
            ("first", "tiny"),
            ("second", "tiny"),
        ]
        status, reply = await live.post("/unload_lora_adapter", {"lora_name": "first"})
        assert status == 200 and set(reply["loaded_adapters"]) == {"second"}
        status, reply = await live.post("/generate", {"input_ids": PROMPT, "lora_path": "first"})
        assert status == 400 and "no LoRA adapter 'first'; loaded: second" in str(reply)

    served(story, folder, lora=shape)


def test_openai_names_an_adapter_behind_the_model(folder, spec, shape):
    async def story(live):
        status, reply = await live.post("/load_lora_adapter_from_tensors", as_tensors(spec, "pirate", 3))
        assert status == 200, reply
        body = {"prompt": "the quick", "temperature": 0, "max_tokens": 8}
        texts = {}
        for model in ("tiny", "tiny:pirate", "other:pirate", "default"):
            status, reply = await live.post("/v1/completions", body | {"model": model})
            assert status == 200 and reply["model"] == model, reply
            texts[model] = reply["choices"][0]["text"]
        assert texts["tiny"] == texts["default"] != texts["tiny:pirate"] == texts["other:pirate"]
        _, reply = await live.post("/v1/completions", body | {"model": "tiny", "lora_path": "pirate"})
        assert reply["choices"][0]["text"] == texts["tiny:pirate"]
        chat = {"messages": [{"role": "user", "content": "fox"}], "temperature": 0, "max_tokens": 8}
        replies = [(await live.post("/v1/chat/completions", chat | {"model": m}))[1] for m in ("tiny", "tiny:pirate")]
        assert replies[0]["choices"][0]["message"] != replies[1]["choices"][0]["message"]
        status, reply = await live.post("/v1/completions", body | {"model": "tiny:nobody"})
        assert status == 400 and "nobody" in reply["message"]

    served(story, folder, lora=shape)


def test_an_update_in_place_needs_its_flag_and_counts_versions(folder, spec, shape, greedy, tmp_path):
    path = str(save_adapter(tmp_path / "first", spec, 1, **STRONG))
    old, new = greedy(1), greedy(5)

    async def story(live):
        load = {"lora_name": "mine", "lora_path": path}
        assert (await live.post("/load_lora_adapter", load))[0] == 200
        assert (await live.generate(lora_path="mine"))["output_ids"] == old
        status, reply = await live.post("/load_lora_adapter", load)
        assert status == 400 and not reply["success"] and "loaded already" in reply["error_message"]
        status, reply = await live.post("/load_lora_adapter_from_tensors", as_tensors(spec, "mine", 5, update=True))
        assert status == 200 and reply["loaded_adapters"]["mine"]["version"] == 1
        assert reply["loaded_adapters"]["mine"]["lora_path"] == "__tensor__"
        answer = await live.generate(lora_path="mine")
        assert answer["output_ids"] == new and answer["meta_info"]["cached_tokens"] == 0

    served(story, folder, lora=shape)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"load_format": None}, "unpickles nothing"),
        ({"serialized_tensors": "???"}, "not base64"),
        ({"config_dict": {"peft_type": "LORA", "r": 4}}, "r and lora_alpha"),
        ({"config_dict": {"peft_type": "LORA", "r": 3, "lora_alpha": 8}}, "has shape"),
        ({"config_dict": {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_dora": True}}, "use_dora"),
        ({"config_dict": {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"(": 2}}}, "rank_pattern"),
        ({"config_dict": {"peft_type": "IA3", "r": 4, "lora_alpha": 8}}, "IA3"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(folder, spec, shape, change, problem):
    async def story(live):
        status, reply = await live.post("/load_lora_adapter_from_tensors", as_tensors(spec, "bad", 1) | change)
        assert status == 400 and not reply["success"] and problem in reply["error_message"], reply
        assert reply["loaded_adapters"] == {}

    served(story, folder, lora=shape)


def test_unknown_modules_are_refused_by_a_sentence(folder, spec, shape):
    config, _ = random_adapter(spec, 1)
    names = {
        "model.layers.0.mlp.experts.3.up_proj": "no LoRA factor of a projection",
        "model.layers.0.mlp.sideways": "no LoRA factor of a projection",
    }

    async def story(live):
        for name, problem in names.items():
            tensors = {f"base_model.model.{name}.lora_A.weight": torch.zeros(4, 64)}
            content = base64.b64encode(safetensors.torch.save(tensors)).decode()
            body = {
                "lora_name": "x",
                "config_dict": config,
                "serialized_tensors": content,
                "load_format": "safetensors",
            }
            status, reply = await live.post("/load_lora_adapter_from_tensors", body)
            assert status == 400 and problem in reply["error_message"], reply

    served(story, folder, lora=shape)


def test_a_server_without_adapters_says_which_flag_starts_one(folder):
    async def story(live):
        status, reply = await live.post("/generate", {"input_ids": PROMPT, "lora_path": "a", "sampling_params": GREEDY})
        assert status == 400 and "--enable-lora" in str(reply)
        status, reply = await live.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"})
        assert status == 400 and "--enable-lora" in reply["error_message"]

    served(story, folder)


def test_the_command_loads_what_it_names(folder, spec, tmp_path):
    path = save_adapter(tmp_path / "first", spec, 1, **STRONG)
    flags = [str(folder), "--lora-paths", f"first={path}", "--max-loras-per-batch", "3", "--device", "cpu"]
    config = read_serve_config([*flags, "--engine-kv-tokens", "512"])

    async def start():
        run = ThreadExecutor("engine")
        server, engine = await build_server(config, None, run)
        try:
            assert server.engine is engine and set(engine.lora.adapters) == {"first"}
            return engine.lora.shape
        finally:
            await engine.close()
            run.close()

    shape = asyncio.run(start())
    assert (shape.num_slots, shape.max_rank) == (3, 4)
    with pytest.raises(UsageError, match="--max-loaded-loras 2 is less than --max-loras-per-batch 3"):
        read_serve_config([*flags, "--max-loaded-loras", "2"])


@pytest.mark.endpoint("/load_lora_adapter_from_tensors")
def test_an_adapter_whose_checksum_differs_is_rejected(folder, spec, shape):
    _, tensors = random_adapter(spec, 1, **STRONG)
    sums = {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}
    damaged = sums | {min(sums): "0" * 64}
    fewer = {name: value for name, value in sums.items() if name != min(sums)}

    async def story(live):
        for expected, words in ((damaged, "arrived damaged"), (fewer, "without a checksum")):
            body = as_tensors(spec, "actor-1", 1, expected_checksums=expected)
            status, reply = await live.post("/load_lora_adapter_from_tensors", body)
            assert status == 400 and words in reply["error_message"] and min(sums) in reply["error_message"]
            assert not reply["loaded_adapters"]
        body = as_tensors(spec, "actor-1", 1, expected_checksums=sums)
        status, reply = await live.post("/load_lora_adapter_from_tensors", body)
        assert status == 200 and set(reply["loaded_adapters"]) == {"actor-1"}

    served(story, folder, lora=shape)
