"""What is enough, what is chosen, and how a machine that has too little is refused."""

import dataclasses

import pytest

from miles.core.errors import UsageError
from miles.rollout.sandbox import isolation, run
from miles.rollout.sandbox.isolation import IsolationProbe
from miles.rollout.sandbox.protocol import IsolationPlan

ALL = IsolationProbe(landlock=7, seccomp="", user="", root="", apart="")
NO_NAMESPACES = dataclasses.replace(ALL, user="unshare: Operation not permitted", root="unshare: no")


@pytest.mark.parametrize(
    ("found", "plan"),
    [
        (ALL, IsolationPlan(namespaces="user", landlock=7, seccomp=True)),
        (dataclasses.replace(ALL, landlock=0), IsolationPlan(namespaces="user", seccomp=True)),
        (dataclasses.replace(ALL, user="no"), IsolationPlan(namespaces="root", landlock=7, seccomp=True)),
        (NO_NAMESPACES, IsolationPlan(landlock=7, seccomp=True, apart=True)),
        (dataclasses.replace(NO_NAMESPACES, apart="closed"), IsolationPlan(landlock=7, seccomp=True)),
    ],
)
def test_the_strongest_walls_are_chosen(found: IsolationProbe, plan: IsolationPlan):
    assert isolation.choose_plan(found) == plan
    assert isolation.find_missing(found) is None


def test_a_machine_without_walls_is_refused_with_what_is_missing(monkeypatch):
    monkeypatch.setattr(isolation, "probe_isolation", lambda: dataclasses.replace(NO_NAMESPACES, landlock=0))
    with pytest.raises(
        UsageError, match=r"Operation not permitted.*Landlock.*user namespaces.*--allow-unsandboxed-code"
    ):
        isolation.plan_isolation(unsandboxed=False)
    assert isolation.plan_isolation(unsandboxed=True) == IsolationPlan(seccomp=True, apart=True)


def test_a_machine_without_seccomp_is_refused(monkeypatch):
    monkeypatch.setattr(
        isolation, "probe_isolation", lambda: dataclasses.replace(ALL, seccomp="prctl 22: Invalid argument")
    )
    with pytest.raises(UsageError, match=r"seccomp is missing \(prctl 22.*CONFIG_SECCOMP_FILTER"):
        isolation.plan_isolation(unsandboxed=False)
    assert isolation.plan_isolation(unsandboxed=True).namespaces == "user"


@pytest.mark.parametrize("unsandboxed", [False, True])
def test_other_systems_are_refused_in_any_case(monkeypatch, unsandboxed):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(UsageError, match="Linux container"):
        isolation.plan_isolation(unsandboxed=unsandboxed)


def test_permission_does_not_take_walls_away(monkeypatch):
    monkeypatch.setattr(isolation, "probe_isolation", lambda: ALL)
    assert isolation.plan_isolation(unsandboxed=True) == isolation.plan_isolation(unsandboxed=False)


def test_what_may_be_read_holds_nobodys_work():
    paths = isolation.readable_paths()
    assert isolation.interpreter() in paths
    for private in ("/", "/home", "/root", "/tmp", "/var", "/etc", "/proc", "/usr", "/usr/src", "/opt", "/srv", "/mnt"):
        assert private not in paths


def test_the_walls_are_tried_out_before_they_are_trusted(plan, monkeypatch):
    assert isinstance(run.create_sandbox(unsandboxed=False, concurrency=1), run.Sandbox)
    monkeypatch.setattr(isolation, "interpreter", lambda: "/usr/bin/false")
    with pytest.raises(UsageError, match="/usr/bin/false"):
        run.create_sandbox(unsandboxed=False, concurrency=1)
