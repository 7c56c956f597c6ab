"""/generate against a live server: tokens and log-probs are the engine's and transformers', fields are SGLang's."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.native.server.live import GREEDY, PROMPT, Live, served
from transformers import AutoTokenizer, Qwen3ForCausalLM

from miles.backends.native.server.config import ServeConfig
from miles.core.protocols import SamplingParams

ALWAYS = {
    *("id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "reasoning_tokens"),
    *("completion_tokens", "cached_tokens", "cached_tokens_details", "dp_rank"),
}


def theirs(folder: Path, prompt: list[int], new: int) -> tuple[list[int], list[float], list[float]]:
    """Greedy tokens, their log-probs, and those of the prompt from its second token on, by transformers."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(new):
            scores = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1], -1)
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
        whole = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], -1)
    return tokens[len(prompt) :], logprobs, whole[torch.arange(len(prompt) - 1), prompt[1:]].tolist()


def test_greedy_tokens_and_log_probs_are_those_of_transformers_and_of_the_engine(folder: Path):
    async def story(live: Live) -> None:
        reply = await live.generate(return_logprob=True, logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=[7])
        tokens, logprobs, scores = theirs(folder, PROMPT, 8)
        meta = reply["meta_info"]
        assert reply["output_ids"] == tokens
        assert [token for _, token, _ in meta["output_token_logprobs"]] == tokens
        assert [token for _, token, _ in meta["input_token_logprobs"]] == PROMPT
        np.testing.assert_allclose([lp for lp, _, _ in meta["output_token_logprobs"]], logprobs, atol=1e-5)
        assert meta["input_token_logprobs"][0][0] is None
        np.testing.assert_allclose([lp for lp, _, _ in meta["input_token_logprobs"][1:]], scores, atol=1e-5)
        assert [row[0][:2] for row in meta["output_top_logprobs"]] == [
            line[:2] for line in meta["output_token_logprobs"]
        ]
        assert all(len(row) == 2 and row[0][0] >= row[1][0] for row in meta["output_top_logprobs"])
        assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"]) == len(PROMPT)
        assert [[token for _, token, _ in row] for row in meta["output_token_ids_logprobs"]] == [[7]] * 8
        completion = await live.engine.generate(
            np.array(PROMPT, np.int32), SamplingParams(temperature=0.0, max_new_tokens=8)
        )
        assert [int(t) for span in completion.spans for t in span.tokens] == tokens
        np.testing.assert_allclose(
            [float(lp) for span in completion.spans for lp in span.logprobs],
            [lp for lp, _, _ in meta["output_token_logprobs"]],
            atol=1e-5,
        )

    served(story, folder)


def test_the_fields_are_there_with_their_kinds(folder: Path):
    async def story(live: Live) -> None:
        reply = await live.generate(return_logprob=True, rid="mine", return_prompt_token_ids=True)
        meta = reply["meta_info"]
        assert set(reply) == {"text", "output_ids", "meta_info", "prompt_token_ids"}
        assert set(meta) >= ALWAYS | {"e2e_latency", "input_token_logprobs", "output_token_logprobs_length"}
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 7, 8)
        assert meta["finish_reason"] == {"type": "length", "length": 8}
        assert (meta["weight_version"], meta["input_token_logprobs"]) == ("default", [])
        assert reply["prompt_token_ids"] == PROMPT
        again = await live.generate(input_ids=PROMPT * 4)
        again = await live.generate(input_ids=PROMPT * 4)
        assert again["meta_info"]["cached_tokens"] == 27
        assert again["meta_info"]["cached_tokens_details"] == {"device": 27, "host": 0}

    served(story, folder)


@pytest.mark.parametrize("start", [0, 3, 7])
def test_prompt_log_probs_begin_where_they_were_asked_for(folder: Path, start: int):
    async def story(live: Live) -> list[Any]:
        reply = await live.generate(return_logprob=True, logprob_start_len=start)
        return reply["meta_info"]["input_token_logprobs"]

    reported = served(story, folder)
    assert [token for _, token, _ in reported] == PROMPT[start:]
    assert all((lp is None) == (i == 0) for i, (lp, _, _) in enumerate(reported))


def test_no_new_tokens_scores_the_prompt_and_no_more(folder: Path):
    async def story(live: Live) -> Any:
        return await live.generate(
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
            return_text_in_logprobs=True,
        )

    reply = served(story, folder)
    assert (reply["text"], reply["output_ids"]) == ("", [])
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(reply["meta_info"]["input_token_logprobs"]) == 7
    assert all(isinstance(text, str) for _, _, text in reply["meta_info"]["input_token_logprobs"])


def test_text_is_what_the_tokenizer_makes_of_the_tokens(folder: Path):
    async def story(live: Live) -> None:
        status, reply = await live.post("/generate", {"text": "the quick", "sampling_params": GREEDY})
        theirs = AutoTokenizer.from_pretrained(folder)
        whole = theirs.decode(theirs.encode("the quick") + reply["output_ids"], skip_special_tokens=True)
        assert status == 200 and whole == "the quick" + reply["text"]
        by_tokens = await live.generate(input_ids=theirs.encode("the quick"))
        assert by_tokens["output_ids"] == reply["output_ids"]

    served(story, folder)


def test_a_batch_is_answered_in_its_order_as_each_alone_would_be(folder: Path):
    async def story(live: Live) -> None:
        prompts = [PROMPT, [3], PROMPT[:2], PROMPT]
        batch = await live.generate(
            input_ids=prompts, sampling_params=[{**GREEDY, "max_new_tokens": n} for n in (8, 3, 5, 2)]
        )
        for prompt, n, reply in zip(prompts, (8, 3, 5, 2), batch, strict=True):
            alone = await live.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": n})
            assert reply["output_ids"] == alone["output_ids"] and reply["text"] == alone["text"]

    served(story, folder)


def test_several_trajectories_differ_and_repeat_with_their_seed(folder: Path):
    async def story(live: Live) -> None:
        how = {"temperature": 1.0, "max_new_tokens": 12, "n": 3, "sampling_seed": 7}
        first, second = await live.generate(sampling_params=how), await live.generate(sampling_params=how)
        drawn = [tuple(reply["output_ids"]) for reply in first]
        assert drawn == [tuple(reply["output_ids"]) for reply in second] and len(set(drawn)) == 3
        unseeded = [await live.generate(sampling_params={**how, "n": 1, "sampling_seed": None}) for _ in range(2)]
        assert unseeded[0]["output_ids"] != unseeded[1]["output_ids"]

    served(story, folder)


def test_a_stream_tells_all_so_far_and_ends_as_the_whole_reply(folder: Path):
    async def story(live: Live) -> None:
        body = {"input_ids": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 24}, "return_logprob": True}
        _, whole = await live.post("/generate", body)
        await live.post("/flush_cache")  # what is found computed is rounded another way
        pieces = await live.stream("/generate", body | {"stream": True})
        assert all(piece["meta_info"]["finish_reason"] is None for piece in pieces[:-1])
        for piece in pieces:
            count = len(piece["output_ids"])
            assert piece["output_ids"] == whole["output_ids"][:count]
            assert piece["meta_info"]["completion_tokens"] == count == len(piece["meta_info"]["output_token_logprobs"])
            assert whole["text"].startswith(piece["text"])
        last = pieces[-1]
        assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
        assert last["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]
        assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]

    served(story, folder)


def test_a_stream_of_differences_adds_up(folder: Path):
    async def story(live: Live) -> None:
        body = {"input_ids": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 24}, "return_logprob": True}
        _, whole = await live.post("/generate", body)
        await live.post("/flush_cache")  # what is found computed is rounded another way
        pieces = await live.stream("/generate", body | {"stream": True})
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        assert [token for piece in pieces for token in piece["output_ids"]] == whole["output_ids"]
        lines = [line for piece in pieces for line in piece["meta_info"]["output_token_logprobs"]]
        assert lines == whole["meta_info"]["output_token_logprobs"]

    served(story, folder, ServeConfig(incremental_streaming_output=True))


def test_a_stream_of_several_says_of_which_each_piece_is(folder: Path):
    async def story(live: Live) -> None:
        body = {"input_ids": [PROMPT, [3, 4]], "sampling_params": {**GREEDY, "n": 2}}
        _, whole = await live.post("/generate", body)
        last = {piece["index"]: piece for piece in await live.stream("/generate", body | {"stream": True})}
        assert [last[i]["output_ids"] for i in range(4)] == [reply["output_ids"] for reply in whole]

    served(story, folder)


def test_what_ends_an_answer_is_told_and_trimmed(folder: Path):
    async def story(live: Live) -> None:
        whole = await live.generate(sampling_params={**GREEDY, "max_new_tokens": 40})
        stop_id = whole["output_ids"][4]
        by_id = await live.generate(sampling_params={**GREEDY, "stop_token_ids": [stop_id]})
        first = whole["output_ids"].index(stop_id)
        assert by_id["output_ids"] == whole["output_ids"][: first + 1]
        assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
        assert whole["text"].startswith(by_id["text"]) or by_id["text"].endswith("�")
        ends = {"logit_bias": {"2": 1000.0}, "max_new_tokens": 8, "temperature": 0}
        by_eos = await live.generate(sampling_params=ends)
        assert by_eos["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
        assert (by_eos["output_ids"], by_eos["text"]) == ([2], "")
        kept = await live.generate(sampling_params={**ends, "no_stop_trim": True, "skip_special_tokens": False})
        assert kept["text"] == "<|im_end|>"
        on = await live.generate(sampling_params={**ends, "ignore_eos": True})
        assert on["output_ids"] == [2] * 8

    served(story, folder)


def test_a_stop_string_cuts_the_text_and_is_never_shown_in_part(folder: Path):
    async def story(live: Live) -> None:
        how = {"temperature": 0, "max_new_tokens": 40, "logit_bias": {str(t): 60.0 for t in (67, 68, 69)}}
        how["frequency_penalty"] = 2.0
        whole = await live.generate(sampling_params=how)
        stop = whole["text"][10:13]
        at = whole["text"].index(stop)
        cut = await live.generate(sampling_params={**how, "stop": [stop]})
        assert cut["text"] == whole["text"][:at]
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        kept = await live.generate(sampling_params={**how, "stop": stop, "no_stop_trim": True})
        assert kept["text"] == whole["text"][: at + 3]
        body = {"input_ids": PROMPT, "sampling_params": {**how, "stop": stop}, "stream": True}
        assert all(cut["text"].startswith(piece["text"]) for piece in await live.stream("/generate", body))
        found = await live.generate(sampling_params={**how, "stop_regex": "[b]"})
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "[b]"}

    served(story, folder)


def test_a_server_without_a_tokenizer_takes_and_gives_tokens(folder: Path):
    async def story(live: Live) -> None:
        reply = await live.generate(return_logprob=True)
        assert set(reply) == {"output_ids", "meta_info"}
        assert reply["output_ids"] == theirs(folder, PROMPT, 8)[0]
        for body in ({"text": "a"}, {"input_ids": PROMPT, "sampling_params": {"stop": ["x"]}}):
            status, refused = await live.post("/generate", body)
            assert status == 400 and "tokenizer" in refused["error"]["message"]
        status, refused = await live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert status == 400 and "tokenizer" in refused["message"]
        assert all(
            "text" not in piece for piece in await live.stream("/generate", {"input_ids": PROMPT, "stream": True})
        )

    served(story, folder, ServeConfig(skip_tokenizer_init=True))


def test_a_rule_is_followed_and_ends_with_the_end(folder: Path):
    async def story(live: Live) -> None:
        yes = await live.generate(sampling_params={**GREEDY, "ebnf": 'root ::= "yes" | "no"'}, return_logprob=True)
        assert yes["text"] in ("yes", "no") and yes["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
        forced = [lp for lp, _, _ in yes["meta_info"]["output_token_logprobs"]][1:]
        np.testing.assert_allclose(forced, 0.0, atol=1e-6)
        status, refused = await live.post("/generate", {"input_ids": PROMPT, "sampling_params": {"regex": "("}})
        assert status == 400 and refused["error"]["message"].startswith("regex cannot be used")

    served(story, folder)


def test_experts_come_as_sglang_packs_them(tmp_path: Path):
    from tests.models.oracle import hf_model

    model = hf_model("qwen3 moe")
    model.config.eos_token_id = 2
    model.save_pretrained(tmp_path)

    async def story(live: Live) -> None:
        spec = live.engine.spec
        reply = await live.generate(return_routed_experts=True, input_ids=[3, 4, 5], sampling_params=GREEDY)
        packed = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4")
        rows = 3 + 8 - 1
        experts = packed.reshape(rows, len(spec.moe_layers), spec.moe.experts_per_token)  # pyright: ignore
        assert experts.min() >= 0 and experts.max() < spec.moe.num_experts  # pyright: ignore
        later = await live.generate(
            return_routed_experts=True, routed_experts_start_len=3, input_ids=[3, 4, 5], sampling_params=GREEDY
        )
        tail = np.frombuffer(base64.b64decode(later["meta_info"]["routed_experts"]), "<i4").reshape(7, -1)
        assert np.array_equal(tail, experts[3:].reshape(7, -1))
        assert "routed_experts" not in (await live.generate(input_ids=[3], sampling_params=GREEDY))["meta_info"]

    served(story, tmp_path, ServeConfig(skip_tokenizer_init=True))


def test_those_with_a_higher_priority_are_served_first(folder: Path):
    async def story(live: Live) -> None:
        ended: list[str] = []

        async def one(name: str, priority: int) -> None:
            await live.generate(priority=priority)
            ended.append(name)

        await live.post("/pause_generation", {"mode": "in_place"})
        tasks = []
        for name, priority in (("low", 0), ("high", 5), ("middle", 3)):
            tasks.append(asyncio.create_task(one(name, priority)))
            await live.until(lambda: live.server.handler.num_running == len(tasks))
        await live.post("/continue_generation", {})
        await asyncio.gather(*tasks)
        assert ended == ["high", "middle", "low"]

    served(story, folder, engine_max_running=1)
