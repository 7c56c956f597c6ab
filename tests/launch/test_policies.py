"""Options of several policies: each has its own values, errors come at once, and the plan shows them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.launch.small_run import write_inputs

from miles.backends.native.config import NativeConfig
from miles.config.cli import parse
from miles.config.files import read_layers
from miles.config.provenance import flatten_values, to_toml
from miles.core.agents import ROLES
from miles.core.errors import UsageError
from miles.core.types import Group, Prompt, Reward, Status, Trajectory
from miles.launch.build.policies import split_engine_memory
from miles.launch.config import Config
from miles.launch.main import main
from miles.launch.plan.topology import get_engine_devices
from miles.launch.policies.config import PolicyConfig, get_main_config, get_policies
from miles.launch.policies.placement import build_resource_requests, place_policies
from miles.launch.read_config import read
from miles.rollout.evaluate import compute_role_scores
from miles.rollout.filters import nonzero_std


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("policies") / "inputs")


def line(inputs: Path, policies: object, *more: str) -> list[str]:
    return [
        *("--hf-checkpoint", str(inputs), "--prompt-data", str(inputs / "train.jsonl"), "--apply-chat-template"),
        *("--custom-cast-function-path", "solver_verifier", "--rm-type", "exact", "--label-key", "label"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--num-rollout", "2", "--device", "cpu"),
        *("--policies", json.dumps(policies), *more),
    ]


def complaints(inputs: Path, policies: object, *more: str) -> list[str]:
    with pytest.raises(UsageError) as refused:
        read("plan", line(inputs, policies, *more))
    return list(refused.value.problems)


def test_a_policy_has_its_own_knobs_over_those_outside(inputs):
    table = {
        "solver": {"lr": 1e-3, "use_kl_loss": True, "kl_loss_coef": 0.1},
        "verifier": {"advantage_estimator": "rloo", "train_every": 3, "rollout_temperature": 0.7},
        "judge": {"frozen": True},
        "second": {"weights": "solver", "rollout_max_response_len": 5},
    }
    config, plan, _ = read("plan", line(inputs, table, "--lr", "1e-4"))
    solver, verifier, judge, second = get_policies(config)
    assert (solver.config.train.lr, verifier.config.train.lr) == (1e-3, 1e-4)
    assert verifier.config.algo.advantage_estimator == "rloo" and verifier.train_every == 3
    assert verifier.config.rollout.rollout_temperature == 0.7 and solver.config.rollout.rollout_temperature == 1.0
    assert judge.frozen and not judge.config.algo.use_kl_loss
    assert second.config == replace(
        solver.config, rollout=replace(solver.config.rollout, rollout_max_response_len=5)
    ), "what has the weights of another has its knobs, too"
    assert plan.reference == inputs, "the plan is the main policy's"


def test_the_main_policy_is_the_first_or_the_actor(inputs):
    config, _, _ = read("plan", line(inputs, {"judge": {"lr": 1e-3}, "actor": {"lr": 1e-5}}))
    assert [m.name for m in get_policies(config)] == ["actor", "judge"]
    assert get_main_config(config).train.lr == 1e-5
    alone = parse(Config, ()).config
    assert alone is not None and get_policies(alone) == (PolicyConfig(name="actor", config=alone, weights="actor"),)


def test_a_policy_starts_from_its_place_in_a_checkpoint_of_all(inputs, tmp_path):
    whole = write_inputs(tmp_path / "step-000002")
    write_inputs(whole / "policies" / "verifier")
    config, _, _ = read("plan", line(whole, {"solver": {}, "verifier": {}, "judge": {"hf_checkpoint": str(inputs)}}))
    folders = {m.name: m.config.models.hf_checkpoint for m in get_policies(config)}
    assert folders == {"solver": str(whole), "verifier": str(whole / "policies" / "verifier"), "judge": str(inputs)}


def test_everything_that_is_wrong_is_told_at_once(inputs):
    table = {
        "solver": {"train_every": 2, "lr": "fast"},
        "verifier": {"frozen": True, "lr": 1e-3, "bananas": 1, "rollout_batch_size": 3},
        "second": {"weights": "solver", "adam_beta1": 0.5, "train_every": 2},
    }
    assert complaints(inputs, table)[:7] == [
        "--policies: solver is the main policy and is trained every step; remove its train_every.",
        "--policies: lr of verifier has no effect for a frozen policy; remove it.",
        "--policies: verifier has no option bananas.",
        "--policies: rollout_batch_size of verifier is the same for all policies; set it outside --policies.",
        "--policies: train_every of second is set by solver, whose weights it has; remove it.",
        "--policies: adam_beta1 of second is set by solver, whose weights it has; remove it.",
        "--policies: lr of solver takes a number, not the text 'fast'.",
    ]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"Solver!": {}}, "--policies: 'Solver!' is not a policy name"),
        ({"a": 3}, "--policies: a takes a table of options"),
        ({"a": {}, "b": {"weights": "c"}}, "weights of b names 'c', which is not a policy"),
        ({"a": {}, "b": {"weights": "a"}, "c": {"weights": "b"}}, "weights of c names b, which has another's"),
        ({"a": {"weights": "a"}}, "a has its own weights anyway"),
        (
            {"a": {"frozen": True}, "b": {}},
            "a is the main policy and is trained with its own weights; remove frozen",
        ),
        ({"a": {}, "b": {"train_every": 0}}, "train_every of b takes a number of steps, at least 1, not 0"),
        ({"a": {}, "b": {"weight_decy": 1}}, "b has no option weight_decy; did you mean weight_decay?"),
        ({"a": {}, "b": {"lr": -1.0}}, "--policies: lr of b must be at least 0, not -1."),
        ({"a": {}, "b": {"kl_loss_coef": 0.1}}, "--policies: for b, --kl-loss-coef needs --use-kl-loss"),
        ({"a": {}, "b": {"hf_checkpoint": "nowhere"}}, "--policies: for b, --hf-checkpoint nowhere"),
        ({"a": {}, "b": {"rollout_temperature": 0.0}}, "--policies: for b, --rollout-temperature 0 is greedy"),
    ],
)
def test_what_a_policy_cannot_be_is_said(inputs, table, expected):
    assert any(expected in sentence for sentence in complaints(inputs, table))


def test_each_policy_has_a_reference_of_its_own(inputs):
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}
    table = {"solver": kl, "verifier": {**kl, "train_every": 3, "ref_update_interval": 4}, "plain": {}}
    config, *_ = read("plan", line(inputs, table, "--save-interval", "2", "--keep-checkpoints", "7"))
    assert [p.config.train.ref_update_interval for p in get_policies(config)] == [2, 4, None]
    said = complaints(inputs, table, "--save-interval", "2", "--keep-checkpoints", "6")
    assert said == [
        "--ref-update-interval 4 needs the checkpoints of the last 12 steps, in which verifier is trained 4 times; "
        "raise --keep-checkpoints to 7."
    ]
    said = complaints(inputs, {"a": kl, "b": {}}, "--ref-update-interval", "2", "--save-interval", "2")
    assert said == [
        "--policies: for b, --ref-update-interval changes the reference of the KL; add --use-kl-loss or --kl-coef, or "
        "remove it."
    ]


def test_megatrons_checkpoints_need_its_ranks_for_each_policy(inputs):
    more = ("--train-backend", "megatron", "--ckpt-format", "torch_dist")
    config, *_ = read("plan", line(inputs, {"a": {}, "b": {"lora_rank": 2}}, *more))
    assert all(policy.config.train.ckpt_format == "torch_dist" for policy in get_policies(config))
    (said,) = complaints(inputs, {"a": {}, "b": {"train_backend": "fsdp"}}, *more)
    assert said.startswith("--policies: for b, --ckpt-format torch_dist needs --train-backend megatron")


def test_what_all_policies_break_is_said_once(inputs):
    said = complaints(inputs, {"a": {}, "b": {}}, "--n-samples-per-prompt", "4", "--kl-loss-coef", "0.5")
    assert len([sentence for sentence in said if "--kl-loss-coef needs --use-kl-loss" in sentence]) == 1
    assert not [sentence for sentence in said if "for b" in sentence]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--custom-generate-function-path multi_turn", "both generate responses; keep one."),
        ("--debug-rollout-only", "--debug-rollout-only samples for one policy, but --policies names several"),
        (
            "--use-opd --opd-teacher-urls http://host:1",
            "--opd-teacher-urls does not work with --policies, each of which has one teacher in its trainer",
        ),
        (
            "--rollout-backend served --rollout-external-engine-addrs 127.0.0.1:9",
            "a and b both name the server 127.0.0.1:9 with --rollout-external-engine-addrs",
        ),
        ("--no-apply-chat-template", "Multi-agent generation needs a chat template; add --apply-chat-template."),
        ("--no-custom-cast-function-path", "--policies needs a function that runs them together"),
    ],
)
def test_what_does_not_go_with_several_policies_is_said(inputs, more, expected):
    given = line(inputs, {"a": {}, "b": {}})
    for flag in ("--apply-chat-template", "--custom-cast-function-path"):
        if f"--no{flag[1:]}" in more:
            at = given.index(flag)
            del given[at : at + (1 if flag == "--apply-chat-template" else 2)]
            more = ""
    with pytest.raises(UsageError) as refused:
        read("plan", [*given, *more.split()])
    assert any(expected in sentence for sentence in refused.value.problems)


def test_a_plan_shows_the_policies(inputs, capsys):
    table = {"solver": {"lr": 1e-3}, "verifier": {"train_every": 2}, "judge": {"weights": "solver"}}
    assert main(["plan", *line(inputs, table)]) == 0
    output = capsys.readouterr().out
    assert "\npolicies\n" in output and "grpo at lr 0.001 every step (the main policy" in output
    assert "every 2 steps on the samples of all of them" in output and "the weights of solver" in output
    assert main(["plan", *line(inputs, table), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["policies"]
    assert [(row["name"], row["weights"], row["train_every"]) for row in rows] == [
        *[("solver", "solver", 1), ("verifier", "verifier", 2), ("judge", "solver", 1)]
    ]


def test_a_plan_shows_the_ranks_engines_and_devices_of_each_policy(inputs, capsys):
    table = {
        "solver": {},
        "verifier": {"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2, "lora_rank": 4},
        "judge": {"frozen": True},
    }
    more = ("--device", "cuda", "--rollout-backend", "served", "--rollout-num-engines", "1")
    assert main(["plan", *line(inputs, table, *more)]) == 0
    said = capsys.readouterr().out.split("\npolicies\n")[1].split("\n\n")[0]
    assert "1 rank of fsdp, in this process, GPU 0" in said
    assert "2 ranks of fsdp, tensor_model_parallel_size 2, in processes of their own, GPUs 1 to 2" in said
    assert "no trainer" in said and said.count("1 × miles serve, GPU") == 3
    assert main(["plan", *line(inputs, table, *more), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["policies"]
    assert [(row["rank_devices"], row["engine_devices"]) for row in rows] == [([0], [0]), ([1, 2], [1]), ([], [3])]


def test_policies_have_devices_beside_each_other(inputs):
    """Ranks in order, then engines that have devices of their own; without ranks, trainers share the first device."""
    table = {"a": {}, "b": {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2}}
    served = ("--rollout-backend", "served", "--rollout-num-gpus", "1")
    placed = place_policies(get_policies(read("plan", line(inputs, table, *served))[0]))
    assert {name: (p.ranks, p.engines, p.detached) for name, p in placed.items()} == {
        "a": (range(0, 1), range(3, 4), False),
        "b": (range(1, 3), range(4, 8), True),
    }
    b = get_policies(read("plan", line(inputs, table, *served))[0])[1].config
    assert [get_engine_devices(b, i, placed["b"].engine_offset) for i in range(2)] == [range(4, 6), range(6, 8)]
    del table["b"]["actor_num_gpus_per_node"]
    placed = place_policies(get_policies(read("plan", line(inputs, table, *served))[0]))
    assert [(p.ranks.start, p.engines, p.detached) for p in placed.values()] == [
        *[(0, range(1, 2), False), (0, range(2, 6), False)]
    ]


def test_a_cluster_is_asked_for_the_ranks_and_engines_of_each_policy(inputs):
    table = {"a": {}, "b": {"actor_num_gpus_per_node": 2, "rollout_num_engines": 2}, "c": {"frozen": True}}
    config, _, _ = read("plan", line(inputs, table, "--rollout-backend", "served", "--runtime", "ray"))
    requests = build_resource_requests(config, get_policies(config))
    assert {name: (r.nodes, r.per_node, r.engines, r.shared, r.total) for name, r in requests.items()} == {
        "a": (1, 1, 1, True, 1),
        "b": (1, 2, 2, True, 2),
        "c": (0, 0, 1, False, 1),
    }


def test_a_recipe_names_policies_in_tables_with_paths_of_its_own(tmp_path):
    recipe = tmp_path / "two.toml"
    (tmp_path / "models").mkdir()  # otherwise it would be a name on the hub
    recipe.write_text('lr = 1e-5\n[policies.a]\nhf_checkpoint = "models/a"\n[policies.b]\nlr = 1e-3\n')
    config = parse(Config, (), read_layers(str(recipe))).config
    assert config is not None
    assert config.multi_agent.policies == {"a": {"hf_checkpoint": str(tmp_path / "models/a")}, "b": {"lr": 1e-3}}
    again = tmp_path / "elsewhere" / "again.toml"
    again.parent.mkdir()
    again.write_text(to_toml(config, dict.fromkeys(flatten_values(config), "x")))
    read_back = parse(Config, (), read_layers(str(again))).config
    assert read_back is not None and read_back.multi_agent.policies == config.multi_agent.policies


def test_engines_of_one_device_take_equal_parts_of_its_memory():
    config = parse(Config, ()).config
    assert config is not None
    config = replace(config, native=NativeConfig(engine_memory_fraction=0.6))
    free, taken = 1.0, []
    for at in range(3):
        member = PolicyConfig(name=f"p{at}", config=config, weights=f"p{at}")
        taken.append(free * split_engine_memory(member, at, 3).native.engine_memory_fraction)
        free -= taken[-1]
    assert taken == pytest.approx([0.2, 0.2, 0.2])


def played(**earned: float) -> Trajectory:
    reward = Reward(value=earned["a"], parts=earned)
    return Trajectory(branches=((),) * len(earned), status=Status.COMPLETED, reward=reward, metadata={ROLES: [*earned]})


def test_a_group_is_kept_when_any_role_has_something_to_learn():
    asked = Prompt(id=0, messages=())
    assert nonzero_std(Group(prompt=asked, trajectories=(played(a=1, b=0), played(a=1, b=1)))).keep
    assert not nonzero_std(Group(prompt=asked, trajectories=(played(a=1, b=0), played(a=1, b=0)))).keep


def test_held_out_scores_are_told_for_each_role():
    groups = [Group(prompt=Prompt(id=0, messages=()), trajectories=(played(a=1, b=0), played(a=0, b=1), played(a=1)))]
    assert compute_role_scores(groups) == {"reward/a": pytest.approx(2 / 3), "reward/b": 0.5}
