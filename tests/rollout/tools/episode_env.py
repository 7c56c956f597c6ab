"""A taskset of verifiers 0.4 with a harness of its own, which plays in this process instead of in a program."""

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class QuizData(vf.TaskData):
    answer: str
    hint: str = "lower"


class QuizTask(vf.Task[QuizData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.nodes[-1].message.content == self.data.answer)

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class QuizTaskset(vf.Taskset[QuizTask, vf.TasksetConfig]):
    def load(self):
        yield QuizTask(QuizData(prompt="A number?", answer="7"))


class QuizHarnessConfig(vf.HarnessConfig):
    streams: bool = False
    breaks: bool = False


class QuizHarness(vf.Harness[QuizHarnessConfig]):
    """Asks, gives the hint, and asks once more."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = False
    SUPPORTS_RESUME = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        return

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        if self.config.breaks:
            raise RuntimeError("the quiz is off")
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                said = await self._said(client, ctx.model, messages)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": data.hint}]
        return ProgramResult(exit_code=0, stdout="", stderr="")

    async def _said(self, client, model, messages):
        if not self.config.streams:
            reply = await client.chat.completions.create(model=model, messages=messages)
            return reply.choices[0].message.content
        pieces = await client.chat.completions.create(model=model, messages=messages, stream=True)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces if piece.choices])


__all__ = ["QuizHarness", "QuizTaskset"]
