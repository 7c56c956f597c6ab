"""Requests to the native API, each with the one thing that is special about it."""

from __future__ import annotations

import json
from typing import Any

from tests.server_api.exchange import Exchange
from tests.server_api.tiny import CONTEXT, END, VOCABULARY

PROMPT = [5, 17, 300, 44, 8, 99, 120]
SHORT = [260, 265, 270]
GREEDY = {"temperature": 0, "max_new_tokens": 8}
PAIR = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
ACROSS = {"stop": ["mY"], "max_new_tokens": 20}
FIVE_HUNDRED = "SGLang answers 500; a wrong request is the client's fault"
DIES = "SGLang's process ends"


def ask(name: str, *, ours: int | None = None, why: str = "", fatal: bool = False, **fields: Any) -> Exchange:
    """A prompt of seven tokens and eight greedy ones in return, but for ``fields``; None leaves a field out."""
    body = {"input_ids": PROMPT, "sampling_params": GREEDY} | fields
    body = {field: value for field, value in body.items() if value is not None}
    return Exchange(name=name, path="/generate", body=body, ours=ours, why=why, fatal=fatal)


def draw(name: str, *, ours: int | None = None, why: str = "", fatal: bool = False, **params: Any) -> Exchange:
    """The same, with other sampling parameters."""
    fields = {"sampling_params": GREEDY | params, "return_logprob": True}
    return ask(name, ours=ours, why=why, fatal=fatal, **fields)


def repeat(name: str, **params: Any) -> Exchange:
    """A prompt after which the model says the same again and again, unless something keeps it from that."""
    return ask(name, input_ids=SHORT, sampling_params=GREEDY | {"max_new_tokens": 16} | params, return_logprob=True)


def raw(name: str, text: str) -> Exchange:
    return Exchange(name=name, path="/generate", raw=text)


SCORED = {"return_logprob": True, "logprob_start_len": 0}
ANSWERED = [
    ask("tokens"),
    ask("text", input_ids=None, text="the quick brown fox"),
    ask("text goes behind tokens where both are given", text="the fox"),
    ask("a batch of tokens", input_ids=[PROMPT, SHORT]),
    ask("a batch of texts", input_ids=None, text=["the quick", " lazy dog"]),
    ask(
        "a batch with parameters each",
        input_ids=[PROMPT, SHORT],
        sampling_params=[GREEDY, GREEDY | {"max_new_tokens": 2}],
        return_logprob=[True, False],
    ),
    ask("no parameters but a limit", sampling_params={"max_new_tokens": 3, "top_k": 1}),
    ask("a field nobody knows", no_such_field=1),
    ask("log-probs", return_logprob=True),
    ask("log-probs of the whole prompt", **SCORED),
    ask("log-probs from a position on", return_logprob=True, logprob_start_len=3),
    ask("log-probs from the prompt's end on", return_logprob=True, logprob_start_len=len(PROMPT)),
    ask("log-probs from -1 on", return_logprob=True, logprob_start_len=-1),
    ask("the likeliest tokens", return_logprob=True, top_logprobs_num=2),
    ask("the likeliest tokens of the prompt too", **SCORED, top_logprobs_num=3),
    ask("the likeliest tokens without log-probs", top_logprobs_num=2),
    ask("chosen tokens' log-probs", **SCORED, token_ids_logprob=[1, 7, 300]),
    ask("words in log-probs", **SCORED, top_logprobs_num=2, token_ids_logprob=[9], return_text_in_logprobs=True),
    ask("log-probs of a text", input_ids=None, text="the quick brown fox", **SCORED, return_text_in_logprobs=True),
    ask("log-probs of a batch", input_ids=[PROMPT, SHORT], return_logprob=True, logprob_start_len=[0, 1]),
    ask("the prompt's tokens back", input_ids=None, text="the quick", return_prompt_token_ids=True),
    ask("a name", rid="my-name"),
    ask("names for a batch", input_ids=[PROMPT, SHORT], rid=["first", "second"]),
    ask("one name for a batch", input_ids=[PROMPT, SHORT], rid="both"),
    ask("a priority", priority=3),
    ask("a session, a routing key and a conversation", session_id="s", routing_key="k", conversation_id="c"),
    ask("experts of a model that has none", return_routed_experts=True),
    Exchange(name="PUT", path="/generate", method="PUT", body={"input_ids": SHORT, "sampling_params": GREEDY}),
    draw("one token", max_new_tokens=1),
    draw("no token at all", max_new_tokens=0),
    ask("no token at all, the prompt scored", sampling_params=GREEDY | {"max_new_tokens": 0}, **SCORED),
    draw("two greedy trajectories", n=2),
    ask("two greedy trajectories each", input_ids=[PROMPT, SHORT], sampling_params=GREEDY | {"n": 2}),
    draw("parameters that are null", top_p=None, top_k=None, min_p=None, frequency_penalty=None, stop=None),
    draw("top-k 1 is greedy at any temperature", temperature=2.0, top_k=1),
    draw("top-k 0 with temperature 0", top_k=0),
    draw("a stop token", stop_token_ids=[183]),
    draw("a stop token that is kept", stop_token_ids=[183], no_stop_trim=True),
    draw("a stop string", stop=[" f"]),
    draw("a stop string that is kept", stop=" f", no_stop_trim=True),
    ask("a stop string across tokens", input_ids=[100, 101, 102], sampling_params=GREEDY | ACROSS),
    draw("a stop pattern", stop_regex="f[aeiou]"),
    draw("no stop strings", stop=[]),
    draw("the end of the sequence", logit_bias={str(END): 1000.0}),
    draw("the end of the sequence ignored", logit_bias={str(END): 1000.0}, ignore_eos=True),
    draw("the end of the sequence kept", logit_bias={str(END): 1000.0}, no_stop_trim=True, skip_special_tokens=False),
    draw("the end of the sequence forbidden for a while", logit_bias={str(END): 1000.0}, min_new_tokens=4),
    draw("special tokens left out of the text", logit_bias={"1": 1000.0}),
    draw("special tokens kept in the text", logit_bias={"1": 1000.0}, skip_special_tokens=False),
    draw("a bias", logit_bias={"24": 3.0, "25": 2.5}),
    repeat("no penalty"),
    repeat("a frequency penalty", frequency_penalty=1.5),
    repeat("a presence penalty", presence_penalty=1.5),
    repeat("a repetition penalty", repetition_penalty=1.6),
    repeat("two penalties", frequency_penalty=0.7, presence_penalty=-0.5),
    draw("a regular expression", regex="(abc|de)+[0-9]{2}"),
    draw("a grammar", ebnf='root ::= "yes" | "no"'),
    ask("a schema", sampling_params=GREEDY | {"json_schema": json.dumps(PAIR), "max_new_tokens": 1}),
    ask("no prompts", input_ids=None, text=[], ours=400, why="SGLang answers an empty list; a prompt is missing"),
    ask("an empty prompt in a batch", input_ids=[PROMPT, []], ours=400, why="SGLang writes after nothing at all"),
    draw("a stop string that is empty", stop="", ours=200, why="SGLang stops at once; an empty string is no stop"),
    draw("no trajectories", n=0, ours=400, why="SGLang makes one"),
    draw("a negative number of trajectories", n=-1, ours=400, why="SGLang makes one"),
    ask("likeliest tokens below 0", return_logprob=True, top_logprobs_num=-1),
    ask("a flag as a word", stream="no", ours=400, why="SGLang reads words such as yes and no as flags"),
    ask("truth values as tokens", input_ids=[True, False], ours=400, why="SGLang takes them for 1 and 0"),
]
REFUSED = [
    ask("empty tokens", input_ids=[]),
    ask("no prompt", input_ids=None),
    ask("an empty text", input_ids=None, text=""),
    ask("tokens that are a string", input_ids="abc"),
    ask("tokens that are fractions", input_ids=[1.5, 2]),
    ask("tokens among words", input_ids=[1, "a"]),
    ask("tokens nested too deeply", input_ids=[[[1]]]),
    ask("a prompt beyond the context", input_ids=[3] * (CONTEXT + 1)),
    ask("more than the context asked for", sampling_params=GREEDY | {"max_new_tokens": CONTEXT}),
    ask("parameters that are a word", sampling_params="x"),
    ask("a name that is a number", rid=5),
    ask("two equal names", input_ids=[PROMPT, SHORT], rid=["same", "same"]),
    ask("too few names", input_ids=[PROMPT, SHORT], rid=["one"]),
    ask("a priority that is a word", priority="high"),
    ask("a flag that is none", return_logprob="maybe"),
    ask("a start beyond the prompt", return_logprob=True, logprob_start_len=50),
    ask("a chosen token beyond the vocabulary", return_logprob=True, token_ids_logprob=[VOCABULARY]),
    ask("a chosen token below 0", return_logprob=True, token_ids_logprob=[-1]),
    ask("hidden states", return_hidden_states=True),
    draw("a negative temperature", temperature=-1),
    draw("a negative limit", max_new_tokens=-1),
    draw("top-p 0", top_p=0),
    draw("top-p 2", top_p=2),
    draw("top-k 0", top_k=0, temperature=1.0),
    draw("min-p 2", min_p=2),
    draw("a frequency penalty of 3", frequency_penalty=3),
    draw("a presence penalty of -3", presence_penalty=-3),
    draw("a repetition penalty of 0", repetition_penalty=0),
    draw("a lower limit above the upper", min_new_tokens=9),
    draw("stop tokens that are words", stop_token_ids=["a"]),
    draw("a bias beyond the vocabulary", logit_bias={str(VOCABULARY): 1.0}),
    draw("a schema that is no JSON", json_schema="{"),
    draw("a regular expression that is none", regex="("),
    draw("a schema and a regular expression", json_schema="{}", regex="a"),
    raw("a body that is no JSON", "{not json"),
    raw("an empty body", ""),
    raw("a body that is a list", "[1, 2]"),
    raw("an empty object", "{}"),
    ask("a refused stream", stream=True, sampling_params={"temperature": -1}),
    ask("a stream beyond the context", stream=True, input_ids=[3] * (CONTEXT + 1)),
    ask("a session nobody opened", session_params={"id": "nobody"}),
    Exchange(name="GET", path="/generate", method="GET"),
    draw("a parameter nobody knows", no_such_parameter=1, ours=400, why=FIVE_HUNDRED),
    draw("a temperature that is a word", temperature="hot", ours=400, why=FIVE_HUNDRED),
    draw("a limit that is a word", max_new_tokens="8", ours=400, why=FIVE_HUNDRED),
    draw("a stop string that is a number", stop=3, ours=400, why=FIVE_HUNDRED),
    ask("too few parameters", input_ids=[PROMPT, SHORT], sampling_params=[GREEDY], ours=400, why=FIVE_HUNDRED),
    ask("a token beyond the vocabulary", input_ids=[1, 99999], ours=400, why=DIES, fatal=True),
    ask("a token below 0", input_ids=[1, -3], ours=400, why=DIES, fatal=True),
    draw("a limit that is a fraction", max_new_tokens=2.5, ours=400, why=DIES, fatal=True),
    ask("a start far below 0", return_logprob=True, logprob_start_len=-5, ours=400, why=DIES, fatal=True),
    ask(
        "more likeliest tokens than there are",
        return_logprob=True,
        top_logprobs_num=10**5,
        ours=400,
        why=DIES,
        fatal=True,
    ),
]
EXCHANGES = [*ANSWERED, *REFUSED]
