"""Rules between rooms, and how they bear with what could not be read."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.launch.small_config import furnish

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.config.schema import get_options
from miles.config.value_types import NumberRange
from miles.launch import rules
from miles.launch.config import (
    Config,
    DemoConfig,
    EnginesRoot,
    ParityRoot,
    ReplayRoot,
    RouteRoot,
    ServeRoot,
    ShowRoot,
)
from miles.launch.rules.check import RULES, Command, check_rules
from miles.launch.rules.flags import FLAG_RULES
from miles.launch.rules.trackers import TRACKER_FLAG_RULES
from miles.launch.rules.training import check_global_batch_size
from miles.launch.upstream.verify import check_upstream_flags

RULE_MODULES = [import_module(f"{rules.__name__}.{file.stem}") for file in Path(rules.__path__[0]).glob("[a-z]*.py")]


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)


def list_problems(line: str, command: Command = "train") -> list[str]:
    reading = parse(Config, line.split(), read_layers("good.toml"))
    return [*reading.problems, *check_rules(reading, command)]


def test_a_complete_recipe_breaks_no_rule():
    assert list_problems("") == []


@pytest.mark.parametrize(
    "line",
    [
        "--prompt-data data/train.jsonl@[3:-2]",
        "--no-num-rollout --num-epoch 3",
        "--global-batch-size 128",
        "--global-batch-size 32",
        "--num-steps-per-rollout 4",
        "--num-steps-per-rollout 4 --global-batch-size 32",
        "--max-weight-staleness 3",
        "--colocate",
        "--use-kl-loss",
        "--use-kl-loss --kl-loss-coef 0.01 --ref-load moe",
        "--hf-checkpoint moe --use-rollout-routing-replay",
        "--eval-interval 3 --eval-prompt-data held data/held.jsonl@[0:5]",
        "--dynamic-sampling-filter-path nonzero_std",
        "--dynamic-sampling-filter-path mine.py:keep",
        "--no-rm-type --custom-rm-path a.b:c --group-rm",
        "--no-rm-type --custom-generate-function-path multi_turn --generate-environment textarena "
        "--apply-chat-template",
        "--no-rm-type --custom-agent-function-path mine.py:agent --apply-chat-template",
        "--no-rm-type --custom-generate-function-path mine.py:answer",
        "--rm-type boxed_f1",
        "--group-rm",
        "--rm-type math:0.9+json_schema:0.1",
        "--rm-type remote_rm --rm-url http://10.0.0.1:8000/score --rm-token-env RM_TOKEN --rm-batch-size 16",
        "--rm-type llm_judge --judge-url https://judge.example/v1 --judge-model big",
        "--loss-type sft_loss --n-samples-per-prompt 1 --no-rm-type",
        "--loss-type sft_loss --n-samples-per-prompt 1 --eval-interval 2 --eval-prompt-data h data/held.jsonl",
        "--loss-type sft_loss --n-samples-per-prompt 1 --eval-interval 2 --eval-prompt-data h data/held.jsonl "
        "--custom-generate-function-path multi_turn --apply-chat-template",
        "--rollout-max-response-len 4096 --rollout-max-context-len 512",
        "--lr 0 --lr-warmup-fraction 1",
        "--rollout-top-k -1 --rollout-seed -3",
        "--actor-num-nodes 1 --rollout-num-gpus 1",
        "--actor-num-gpus-per-node 5",
        "--actor-num-gpus-per-node 8 --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2",
        "--actor-num-gpus-per-node 4 --data-parallel-replicate-size 2 --distributed-timeout-minutes 1",
        "--actor-num-gpus-per-node 4 --hf-checkpoint moe --expert-model-parallel-size 2 --tensor-model-parallel-size 2",
        "--rollout-num-gpus-per-engine 2 --rollout-num-gpus 2",
        "--eps-clip-c 3 --eps-clip 0",
        "--rollout-temperature 0.7 --eval-temperature 0",
        "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --use-opsm --opsm-delta 0.01",
        "--advantage-estimator rloo --advantage-role-key side --overlong-buffer-len 64 --overlong-penalty-factor 0.5",
        "--disable-grpo-std-normalization --constant-loss-length 64",
        "--loss-type custom_loss --custom-loss-function-path mine.py:loss --use-kl-loss",
        "--custom-reward-post-process-path mine.py:worth --n-samples-per-prompt 1 --overlong-buffer-len 4",
        "--custom-pg-loss-reducer-function-path mine.py:weigh --use-kl-loss --kl-loss-coef 0.1 --use-unbiased-kl",
        "--use-tis --tis-clip 3 --tis-clip-low 0.5 --tis-level sequence --tis-batch-normalize",
        "--use-tis --tis-mode mask --use-rs --rs-level geometric --rs-veto-threshold 1e-4",
        "--use-tis --tis-mode auto --rs-veto-threshold 1e-4 --max-weight-staleness 2",
        "--use-tis --tis-mode icepop --tis-clip 4 --no-use-rollout-logprobs",
        "--use-rs --rs-upper-bound 1.5 --tis-batch-normalize",
        "--use-tis --custom-tis-function-path mine.py:weigh",
    ],
)
def test_what_goes_together_is_accepted(line: str):
    assert list_problems(line) == []


def test_a_rule_is_silent_about_what_could_not_be_read():
    assert list_problems("--n-samples-per-prompt one --global-batch-size 7") == [
        "--n-samples-per-prompt takes a whole number, not 'one'."
    ]


def test_a_number_out_of_range_is_told_once():
    assert list_problems("--n-samples-per-prompt 0 --global-batch-size 7") == [
        "--n-samples-per-prompt must be at least 1, not 0."
    ]


def test_talking_and_scoring_need_less_than_training():
    bare = parse(Config, ["--hf-checkpoint", "model"])
    assert check_rules(bare, "chat") == []
    scored = "--hf-checkpoint model --rm-type math --eval-prompt-data held data/held.jsonl --eval-label-key label"
    assert check_rules(parse(Config, [*scored.split(), "--rollout-max-response-len", "9"]), "eval") == []


def test_an_accelerator_asked_for_must_be_there_to_train_but_not_to_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list_problems("--device cuda", "plan") == []
    assert list_problems("--device cuda", "train") == [
        "--device cuda is not available: this machine shows no accelerator; use --device cpu, or see miles doctor."
    ]


def test_an_engine_spans_no_more_devices_than_there_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    line = "--rollout-num-gpus-per-engine 2 --device cuda"
    assert list_problems(line, "plan") == []
    (problem, *_) = [sentence for sentence in list_problems(line, "train") if "per-engine" in sentence]
    assert problem == ("--rollout-num-gpus-per-engine 2 exceeds the 1 GPUs of this machine; lower it.")
    assert list_problems("--rollout-num-gpus-per-engine 2 --device cpu", "train") == []


def test_a_trainer_spans_no_more_devices_than_there_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("miles.launch.plan.hardware.list_accelerators", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr("miles.launch.plan.hardware.get_torch_build", lambda: "CUDA 13.0")
    (sentence,) = list_problems("--actor-num-gpus-per-node 4")
    assert sentence == ("--actor-num-gpus-per-node 4 exceeds the 2 GPUs of this machine; lower it.")
    assert list_problems("--actor-num-gpus-per-node 4 --device cpu") == []
    assert list_problems("--actor-num-gpus-per-node 4", "plan") == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "--ckpt-format torch_dist needs --train-backend megatron"),
        (
            "--train-backend megatron --lora-rank 4 --train-precision int4_g32",
            "--ckpt-format torch_dist does not support adapters over a packed base (--train-precision)",
        ),
    ],
)
def test_megatrons_checkpoints_are_refused_where_they_cannot_store_a_run(line: str, sentence: str):
    (problem,) = list_problems(f"--ckpt-format torch_dist {line}", "plan")
    assert problem.startswith(sentence)


EXPORT = "--save-hf out --rollout-precision fp8 --save-hf-precision rollout"


@pytest.mark.parametrize(
    "more", ["", "--no-lora-merge", "--lora-dropout 0.1", "--use-dora", "--push-to-hub me/it", EXPORT]
)
def test_megatrons_checkpoints_take_adapters_of_any_form_and_are_exported(more: str):
    line = f"--ckpt-format torch_dist --train-backend megatron --lora-rank 4 {more}"
    assert list_problems(line, "plan") == []


def test_megatron_is_refused_where_it_is_not_there_or_lacks_what_is_asked(monkeypatch: pytest.MonkeyPatch):
    line = "--train-backend megatron --actor-num-gpus-per-node 4 --pipeline-model-parallel-size 2"
    for found, missing in ((None, 1), (object(), 0)):
        monkeypatch.setattr("miles.launch.rules.training.find_spec", lambda _, found=found: found)
        assert len([s for s in list_problems(line, "train") if "megatron-core, which is not installed" in s]) == missing
    assert list_problems(line, "plan") == []
    assert list_problems(f"{line} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", "plan") == []
    assert list_problems(f"{line} --megatron-moe-token-dispatcher-type alltoall", "plan") == []
    assert list_problems(f"{line} --advantage-estimator ppo", "plan") == []
    pairs = "--loss-type rm_loss --n-samples-per-prompt 1 --no-rm-type --chosen-key label --rejected-key input"
    assert list_problems(f"{line} {pairs}", "plan") == []
    assert list_problems(f"{line} {pairs} --lora-rank 4", "plan") == []
    assert list_problems(f"{line} --advantage-estimator ppo --lora-rank 4", "plan") == []
    (copies,) = list_problems(f"{line} --data-parallel-replicate-size 2", "plan")
    assert "--data-parallel-replicate-size needs --train-backend fsdp" in copies


def test_a_config_that_is_not_json_is_told(tmp_path: Path):
    (tmp_path / "model" / "config.json").write_text("{")
    (problem,) = list_problems("")
    assert problem.startswith("--hf-checkpoint model cannot be used: model/config.json is not valid JSON")


def test_a_path_that_cannot_be_looked_at_is_told():
    name = "x" * 300
    assert list_problems(f"--ref-load {name}") == [f"{name} cannot be read: File name too long."]


def test_every_rule_is_in_use():
    defined = {
        rule
        for module in RULE_MODULES
        for name, rule in vars(module).items()
        if name.startswith("check_")
        and getattr(rule, "__annotations__", {}) == {"c": Config, "return": Iterator[str]}
        and getattr(rule, "__module__", "") == module.__name__
    }
    used = {rule for group in RULES.values() for rule in group}
    assert len(defined) > 50 and defined | {check_upstream_flags} == used - {*FLAG_RULES, *TRACKER_FLAG_RULES}


def test_every_number_has_a_range_and_every_default_is_inside():
    for root in (Config, DemoConfig, ServeRoot, RouteRoot, ShowRoot, ReplayRoot, ParityRoot, EnginesRoot):
        for option in get_options(root).values():
            if option.value_type.scalar in (int, float):
                assert option.range != NumberRange(), option.name
                option.check_range(option.default)


@given(st.floats(-10, 10), st.floats(-10, 10), st.floats(-10, 10))
def test_a_range_contains_what_its_words_say(a: float, b: float, x: float):
    low, high = sorted((a, b))
    assert NumberRange(ge=low, le=high).contains(x) == (low <= x <= high)
    assert NumberRange(gt=low, lt=high).contains(x) == (low < x < high)
    assert NumberRange(ge=20, or_value=x).contains(x)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 800), st.integers(1, 800))
def test_the_batch_identity_holds_exactly_when_no_rule_objects(prompts: int, trajectories: int, size: int, steps: int):
    line = f"--rollout-batch-size {prompts} --n-samples-per-prompt {trajectories}"

    def objects(more: str) -> bool:
        config = parse(Config, f"{line} {more}".split()).config
        assert config is not None
        return bool(list(check_global_batch_size(config)))

    made = prompts * trajectories
    assert objects(f"--global-batch-size {size}") == (made % size != 0)
    assert objects(f"--num-steps-per-rollout {steps}") == (made % steps != 0)
    assert objects(f"--global-batch-size {size} --num-steps-per-rollout {steps}") == (made != size * steps)


def test_a_session_server_that_other_machines_reach_has_a_key_of_a_file_or_of_the_run(tmp_path: Path):
    agent = "--no-rm-type --custom-agent-function-path mine.py:agent --apply-chat-template"
    key = tmp_path / "key"
    for host in ("0.0.0.0", "10.0.0.7", "example.org"):
        assert list_problems(f"{agent} --session-server-ip {host}") == []
    with_key = f"{agent} --session-server-host 0.0.0.0 --session-server-api-key-file {key}"
    assert list_problems(with_key) == [
        f"--session-server-api-key-file {key} cannot be read: No such file or directory."
    ]
    key.write_text("\n")
    assert list_problems(with_key) == [f"--session-server-api-key-file {key} has no key; write one on its only line."]
    key.write_text("secret\n")
    assert list_problems(with_key) == list_problems(f"{agent} --session-server-host ::1") == []


def test_the_certificate_of_a_session_server_is_checked(tmp_path: Path):
    agent = "--no-rm-type --custom-agent-function-path mine.py:agent --apply-chat-template"
    missing = tmp_path / "cert.pem"
    assert list_problems(f"{agent} --session-server-ssl-certfile {missing}") == [
        f"--session-server-ssl-certfile {missing} does not exist; give a PEM file."
    ]
    missing.write_text("")
    assert list_problems(f"{agent} --session-server-ssl-keyfile {missing}") == [
        "--session-server-ssl-keyfile needs --session-server-ssl-certfile; add it."
    ]
    assert list_problems(f"{agent} --session-server-advertise-host http://a/") == [
        "--session-server-advertise-host http://a/ is not a host; leave out the scheme."
    ]


def test_where_a_run_is_copied_to_is_checked():
    assert list_problems("--push-to-hub nowhere", "plan") == [
        "--push-to-hub nowhere is not a repository; write ORG/NAME."
    ]
    assert list_problems("--hub-private") == [
        "--hub-private and --hub-revision are about --push-to-hub; add it, or remove them."
    ]
    assert list_problems("--save-remote backups") == [
        "--save-remote backups is not a URL: write s3://bucket/run, or use --save for a folder."
    ]


TRACKERS = {
    "--use-tensorboard": ("tensorboard", "tensorboard"),
    "--use-wandb": ("wandb", "wandb"),
    "--use-mlflow": ("mlflow", "mlflow"),
    "--use-trackio": ("trackio", "trackio"),
    "--metrics-port 0": ("prometheus_client", "prometheus"),
    "--otlp-endpoint http://h:4318": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry"),
}


@pytest.mark.parametrize("line", TRACKERS)
def test_a_tracker_that_is_not_installed_stops_a_run_and_no_plan(monkeypatch, line):
    monkeypatch.setattr("miles.launch.rules.trackers.find_spec", lambda _: None)
    package, extra = TRACKERS[line]
    assert list_problems(line, "plan") == []
    expected = f"{line.split()[0]} needs the package {package}: pip install 'miles-rl[{extra}]'."
    assert list_problems(line) == [expected]


@pytest.mark.parametrize(
    ("line", "variable"),
    [
        ("--use-wandb --wandb-host https://me:pw123456@host", "WANDB_API_KEY"),
        ("--use-mlflow --mlflow-tracking-uri postgresql://me:pw123456@host/db", "MLFLOW_TRACKING_PASSWORD"),
        ("--use-trackio --trackio-server-url https://host?write_token=pw123456", "TRACKIO_WRITE_TOKEN"),
        ("--otlp-endpoint https://me:pw123456@host", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_a_secret_in_the_url_of_a_tracker_is_refused_and_not_repeated(line, variable):
    (problem,) = list_problems(line, "plan")
    assert variable in problem and "pw123456" not in problem


def test_metrics_for_other_machines_need_a_token(monkeypatch):
    monkeypatch.delenv("MILES_API_KEY", raising=False)
    assert list_problems("--metrics-port 0 --metrics-host 127.0.0.1") == []
    (problem,) = list_problems("--metrics-port 0 --metrics-host 0.0.0.0")
    assert "MILES_API_KEY" in problem
    monkeypatch.setenv("MILES_API_KEY", "t" * 20)
    assert list_problems("--metrics-port 0 --metrics-host 0.0.0.0") == []
