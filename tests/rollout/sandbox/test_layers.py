"""What is enough, what is chosen, and how a machine that has too little is refused."""

import dataclasses

import pytest

from miles.core.errors import UsageError
from miles.rollout.sandbox import layers, run
from miles.rollout.sandbox.layers import Found
from miles.rollout.sandbox.order import Plan

ALL = Found(landlock=7, seccomp="", user="", root="", apart="")
NO_NAMESPACES = dataclasses.replace(ALL, user="unshare: Operation not permitted", root="unshare: no")


@pytest.mark.parametrize(
    ("found", "plan"),
    [
        (ALL, Plan(namespaces="user", landlock=7, seccomp=True)),
        (dataclasses.replace(ALL, landlock=0), Plan(namespaces="user", seccomp=True)),
        (dataclasses.replace(ALL, user="no"), Plan(namespaces="root", landlock=7, seccomp=True)),
        (NO_NAMESPACES, Plan(landlock=7, seccomp=True, apart=True)),
        (dataclasses.replace(NO_NAMESPACES, apart="closed"), Plan(landlock=7, seccomp=True)),
    ],
)
def test_the_strongest_walls_are_chosen(found: Found, plan: Plan):
    assert layers.choose(found) == plan
    assert layers.missing(found) is None


def test_a_machine_without_walls_is_refused_with_what_is_missing(monkeypatch):
    monkeypatch.setattr(layers, "find", lambda: dataclasses.replace(NO_NAMESPACES, landlock=0))
    with pytest.raises(
        UsageError, match=r"Operation not permitted.*Landlock.*user namespaces.*--allow-unsandboxed-code"
    ):
        layers.plan_here(unsandboxed=False)
    assert layers.plan_here(unsandboxed=True) == Plan(seccomp=True, apart=True)


def test_a_machine_without_seccomp_is_refused(monkeypatch):
    monkeypatch.setattr(layers, "find", lambda: dataclasses.replace(ALL, seccomp="prctl 22: Invalid argument"))
    with pytest.raises(UsageError, match=r"seccomp is missing \(prctl 22.*CONFIG_SECCOMP_FILTER"):
        layers.plan_here(unsandboxed=False)
    assert layers.plan_here(unsandboxed=True).namespaces == "user"


@pytest.mark.parametrize("unsandboxed", [False, True])
def test_other_systems_are_refused_in_any_case(monkeypatch, unsandboxed):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(UsageError, match="Linux container"):
        layers.plan_here(unsandboxed=unsandboxed)


def test_permission_does_not_take_walls_away(monkeypatch):
    monkeypatch.setattr(layers, "find", lambda: ALL)
    assert layers.plan_here(unsandboxed=True) == layers.plan_here(unsandboxed=False)


def test_what_may_be_read_holds_nobodys_work():
    paths = layers.readable_paths()
    assert layers.interpreter() in paths
    for private in ("/", "/home", "/root", "/tmp", "/var", "/etc", "/proc", "/usr", "/usr/src", "/opt", "/srv", "/mnt"):
        assert private not in paths


def test_the_walls_are_tried_out_before_they_are_trusted(plan, monkeypatch):
    assert isinstance(run.sandbox_here(unsandboxed=False, concurrency=1), run.Sandbox)
    monkeypatch.setattr(layers, "interpreter", lambda: "/usr/bin/false")
    with pytest.raises(UsageError, match="/usr/bin/false"):
        run.sandbox_here(unsandboxed=False, concurrency=1)
