"""A generate function that asks a service for a document between two turns, and its reward."""

import os

from miles.rollout.sglang_rollout import GenerateState
from miles.utils.http_utils import post
from miles.utils.types import Sample

MAX_TURNS = 2


async def find(query: str) -> str:
    reply = await post(os.environ["RETRIEVAL_URL"], {"query": query})
    return f" {reply['document']} "


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response_ids, loss_mask, log_probs, text = [], [], [], ""
    for turn in range(MAX_TURNS):
        payload = {
            "input_ids": prompt_ids + response_ids,
            "sampling_params": {**sampling_params, "max_new_tokens": 3},
            "return_logprob": True,
        }
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        response_ids += ids
        loss_mask += [1] * len(ids)
        log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        text += output["text"]
        if turn + 1 < MAX_TURNS:
            document = await find(output["text"])
            seen = state.tokenizer(document, add_special_tokens=False)["input_ids"]
            response_ids += seen
            loss_mask += [0] * len(seen)
            log_probs += [0.0] * len(seen)
            text += document
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = text
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    sample.searches = MAX_TURNS - 1
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    assert sample.searches == 1
    return float(len(set(sample.label) & set(sample.response)))
