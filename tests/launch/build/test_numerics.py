"""``--parity`` reaches every model that a command builds: engine, trainer, reference and critic, ranks and servers."""

import ast
import asyncio
from pathlib import Path

import pytest
import torch
from tests.launch.small_run import flags, write_inputs

import miles
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.errors import HookError
from miles.kernels.numerics import BATCH_INVARIANT, FAST, Numerics
from miles.launch.build.engines import load_engine
from miles.launch.build.hooks import load_algo_hooks
from miles.launch.build.models import read_policy
from miles.launch.build.policies import build_advantages, build_stack, read_policies
from miles.launch.commands.serve import build_server, read_serve_config
from miles.launch.distributed.driver import start_on_devices
from miles.launch.distributed.resilient_trainer import RecoveryState
from miles.launch.read_config import read
from miles.models.decoder import Decoder
from miles.models.model_provider import apply_model_provider
from miles.observe.start_timer import StartTimer
from miles.schedule.checkpoints import CheckpointDirectory

SOURCE, WIRING = Path(miles.__file__).parent, ("backends", "launch")
# What is built with numerics that default to FAST, as the wiring calls it.
BUILDERS = {
    "Decoder": "Decoder",
    "DecoderTransformerConfig": "DecoderTransformerConfig",
    "EagleDraft": "EagleDraft",
    "FsdpMesh": "FsdpMesh",
    "HeadOutput": "HeadOutput",
    "HyperConnection": "HyperConnection",
    "HyperHead": "HyperHead",
    "MtpDraft": "MtpDraft",
    "NativeEngine": "NativeEngine",
    "build_megatron_batch": "build_megatron_batch",
    "build_meta_draft": "build_meta_draft",
    "build_tp_decoder": "build_tp_decoder",
    "build_transformer_config": "build_transformer_config",
    "estimate_rank_activations": "estimate_rank_activations",
    "estimate_single_peak": "estimate_single_peak",
    "estimate_stage_activations": "estimate_stage_activations",
    "init_eagle": "init_eagle",
    "init_random": "hf.init_random",
    "load": "hf.load",
    "load_eagle": "load_eagle",
    "load_megatron_model": "load_megatron_model",
    "load_model": "hf.load_model",
    "load_mtp": "load_mtp",
    "load_reward_model": "load_reward_model",
}
EXPECTED = {"fast": FAST, "exact": BATCH_INVARIANT}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"), moe=True)


def numerics_of(model) -> set[Numerics]:
    """The numerics of a model and of every layer that has some."""
    return {module.numerics for module in model.modules() if "numerics" in vars(module)}


def engine_numerics(engine: NativeEngine) -> set[Numerics]:
    return numerics_of(engine._runner.decoder) | {engine._runner.numerics}


@pytest.mark.parametrize("parity", EXPECTED)
def test_engine_trainer_reference_and_critic_have_the_numerics_of_the_run(inputs, tmp_path, parity):
    more = ("--parity", parity, "--advantage-estimator", "ppo")
    config, plan, _ = read("train", flags(inputs, tmp_path / "run", *more))
    policies = read_policies(config, plan)
    recovery = RecoveryState(
        checkpoints=CheckpointDirectory(tmp_path), rollouts=None, estimator=build_advantages(config, policies)
    )
    stack = build_stack(
        policies, overlap=False, steps=2, recovery=recovery, report=lambda text: None, timer=StartTimer()
    )
    (engine,), trainer = stack.native_engines, stack.trainer
    assert engine_numerics(engine) == {EXPECTED[parity]}
    critic = trainer._critic._model._backbone
    for model in (trainer._actor, trainer._objective.gradient.reference, critic):
        assert model.numerics == EXPECTED[parity] and numerics_of(model._decoder) == {EXPECTED[parity]}
    asyncio.run(engine.close())


def test_a_rank_of_the_trainer_has_the_numerics_of_the_run(inputs, tmp_path):
    config, plan, _ = read("train", flags(inputs, tmp_path / "run", "--parity", "exact"))
    policy, hooks = read_policy(config), load_algo_hooks(config)
    device, run = policy.platform.device, InlineExecutor()
    trainer = start_on_devices([device], config, plan, policy, run, steps=2, algo_hooks=hooks)
    try:
        actor = trainer._rank._actor
        assert actor.numerics == actor.mesh.numerics == BATCH_INVARIANT
        assert numerics_of(actor._decoder) == {BATCH_INVARIANT}
    finally:
        trainer.close()


@pytest.mark.parametrize("parity", EXPECTED)
def test_chat_eval_and_serve_have_the_numerics_of_their_flags(inputs, tmp_path, parity):
    config, _, _ = read("chat", ["--hf-checkpoint", str(inputs), "--device", "cpu", "--parity", parity])
    options = [str(inputs), "--device", "cpu", "--engine-kv-tokens", "64", "--parity", parity]

    async def build() -> list[NativeEngine]:
        _, served = await build_server(read_serve_config(options), None, InlineExecutor())
        engines = [await load_engine(config, read_policy(config)), served]
        for engine in engines:
            await engine.close()
        return engines

    assert [engine_numerics(engine) for engine in asyncio.run(build())] == 2 * [{EXPECTED[parity]}]


def test_a_model_provider_that_loses_the_numerics_is_refused(inputs):
    config, _, _ = read("chat", ["--hf-checkpoint", str(inputs), "--device", "cpu", "--parity", "exact"])
    how = {"device": "meta", "dtype": torch.float32}
    given = Decoder(read_policy(config).spec, **how, numerics=BATCH_INVARIANT)
    with pytest.raises(HookError, match="build it with numerics=model"):
        apply_model_provider(given, lambda model: Decoder(model.spec, **how))


# -- no call relies on the default ----------------------------------------------------------


def find_builders() -> set[str]:
    """Every function, class and dataclass of the package whose argument ``numerics`` has a default."""
    found: set[str] = set()
    for text in (file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if "numerics: Numerics = " in text else ():
            if isinstance(node, ast.ClassDef):
                inits = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
                fields = [part for part in node.body if isinstance(part, ast.AnnAssign) and node.decorator_list]
                defaults = [field for field in fields if ast.unparse(field.target) == "numerics" and field.value]
                if defaults or any(has_default(init) for init in inits):
                    found.add(node.name)
            elif isinstance(node, ast.FunctionDef) and node.name != "__init__" and has_default(node):
                found.add(node.name)
    return found


def has_default(function: ast.FunctionDef) -> bool:
    pairs = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return any(argument.arg == "numerics" and default is not None for argument, default in pairs)


def test_backends_and_launch_always_name_the_numerics():
    assert find_builders() == BUILDERS.keys()
    files = {file: file.read_text(encoding="utf-8") for part in WIRING for file in (SOURCE / part).rglob("*.py")}
    silent = [
        f"{file.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node.func)}"
        for file, text in files.items()
        if any(f"{name}(" in text for name in BUILDERS.values())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in BUILDERS.values()
        and not any(keyword.arg == "numerics" for keyword in node.keywords)
    ]
    assert not silent
