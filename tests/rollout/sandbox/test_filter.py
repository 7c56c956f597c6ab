"""The filter does what its table says on both machines; it is run here by a small interpreter of its language."""

import errno
import re
import struct
from pathlib import Path

import pytest

from miles.rollout.sandbox import calls, filter
from miles.rollout.sandbox.order import Plan

MACHINES = ("x86_64", "aarch64")
WALLED = Plan(namespaces="user", landlock=7, seccomp=True)
ALONE = Plan(landlock=1, seccomp=True)
ALLOW, KILL = "allow", "kill"
ME = 4321


def asked(code: list[tuple[int, int, int, int]], number: int, *args: int, arch: int) -> str | int:
    """What the filter answers to a call: allow, kill, or an error number."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *(*args, 0, 0, 0, 0, 0, 0)[:6])
    at, held = 0, 0
    while True:
        kind, yes, no, value = code[at]
        at += 1
        if kind == 0x20:
            (held,) = struct.unpack_from("<I", data, value)
        elif kind == 0x54:
            held &= value
        elif kind == 0x15:
            at += yes if held == value else no
        else:
            assert kind == 0x06
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(value, value & 0xFFFF)


class Filtered:
    def __init__(self, machine: str, plan: Plan, *, may_fork: bool = True) -> None:
        self._code = filter.assembled(machine, plan, pid=ME, may_fork=may_fork)
        self._arch = filter.ARCHITECTURES[machine]
        every = calls.PLAIN + calls.CHECKED + calls.INSIDE
        self.numbers = calls.numbers(every, machine)

    def __call__(self, name: str | int, *args: int) -> str | int:
        number = self.numbers[name] if isinstance(name, str) else name
        return asked(self._code, number, *args, arch=self._arch)

    def foreign(self) -> str | int:
        return asked(self._code, 1, arch=0x40000003)


@pytest.mark.parametrize("machine", MACHINES)
def test_only_what_is_listed_exists(machine):
    ask = Filtered(machine, WALLED)
    listed = {**calls.numbers(calls.PLAIN, machine), **calls.numbers(calls.INSIDE, machine)}
    looked_at = calls.numbers(calls.CHECKED, machine).values()
    for number in [*range(600), 1 << 30, (1 << 30) + 41, (1 << 32) - 1]:
        if number not in looked_at:
            assert ask(number) == (ALLOW if number in listed.values() else errno.ENOSYS), number


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_machine_are_fatal(machine):
    assert Filtered(machine, WALLED).foreign() == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_are_looked_at(machine):
    ask = Filtered(machine, WALLED)
    assert ask("socket", 2, 1) == ask("socket", 1, 1) == errno.EPERM
    assert ask("socketpair", 1, 1 | 0o2000000) == ALLOW
    assert ask("socketpair", 1, 2) == ask("socketpair", 2, 1) == errno.EPERM
    assert ask("sendto", 3, 0, 0, 0, 0) == ALLOW
    assert ask("sendto", 3, 0, 0, 0, 1) == ask("sendto", 3, 0, 0, 0, 1 << 40) == errno.EPERM
    assert ask("openat", 0, 0, 0o1 | 0o100 | 0o1000) == ask("openat", 0, 0, 0o2000000) == ALLOW
    assert ask("openat", 0, 0, 0o1000) == ask("openat", 0, 0, 3) == errno.EPERM
    assert ask("clone", 0x1200011) == ask("clone", 0x3D0F00) == ALLOW
    assert {ask("clone", 1 << bit | 17) for bit in (17, *range(25, 31))} == {errno.EPERM}
    assert ask("prlimit64", 0) == ALLOW and ask("prlimit64", 5) == errno.EPERM
    assert ask("fcntl", 3, 1030) == ALLOW and ask("fcntl", 3, 8) == ask("fcntl", 3, 10) == errno.EPERM
    assert ask("ioctl", 0, 0x5401) == ALLOW and ask("ioctl", 0, 0x5412) == errno.EPERM
    assert ask("prctl", 15) == ALLOW and ask("prctl", 22) == ask("prctl", 4) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_without_other_walls_against_it_signals_stay_at_home(machine):
    assert Filtered(machine, WALLED)("kill", 1) == Filtered(machine, ALONE._replace(landlock=6))("kill", 1) == ALLOW
    ask = Filtered(machine, ALONE)
    assert ask("kill", ME) == ask("kill", 0) == ask("tgkill", ME, ME) == ALLOW
    assert ask("kill", 1) == ask("kill", (1 << 32) - 1) == ask("tgkill", 1, 1) == ask("tkill", ME) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_without_namespaces_no_file_is_changed_by_its_name(machine):
    ask = Filtered(machine, ALONE)
    assert {ask(number) for number in calls.numbers(calls.INSIDE, machine).values()} == {errno.ENOSYS}


@pytest.mark.parametrize("machine", MACHINES)
def test_where_processes_cannot_be_counted_there_is_one(machine):
    ask = Filtered(machine, ALONE, may_fork=False)
    known = set(ask.numbers) & {"clone", "fork", "vfork"}
    assert {ask(name, 17) for name in known} == {errno.EAGAIN}
    assert Filtered(machine, ALONE)("clone", 17) == ALLOW


@pytest.mark.parametrize(
    ("header", "machine"),
    [
        ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "x86_64"),
        ("/usr/include/asm/unistd_64.h", "x86_64"),
        ("/usr/include/valgrind/vki/vki-scnums-amd64-linux.h", "x86_64"),
        ("/usr/include/asm-generic/unistd.h", "aarch64"),
    ],
)
def test_numbers_are_the_kernels(header, machine):
    if not Path(header).is_file():
        pytest.skip("no such header here")
    text = Path(header).read_text(encoding="utf-8")
    defined = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", text)}
    defined["newfstatat"] = defined.get("newfstatat", defined.get("fstatat", -1))
    ours = calls.numbers(calls.PLAIN + calls.CHECKED + calls.INSIDE, machine)
    assert {name: number for name, number in ours.items() if name in defined} == {
        name: defined[name] for name in ours if name in defined
    }
    assert len(set(ours) & set(defined)) > 100 and len(set(ours.values())) == len(ours)
