"""The filter does what its table says on both machines; it is run here by a small interpreter of its language."""

import errno
import re
import struct
from pathlib import Path

import pytest

from miles.rollout.sandbox import seccomp
from miles.rollout.sandbox.protocol import IsolationPlan

MACHINES = ("x86_64", "aarch64")
NAMESPACED_PLAN = IsolationPlan(namespaces="user", landlock=7, seccomp=True)
LANDLOCK_PLAN = IsolationPlan(landlock=1, seccomp=True)
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
    def __init__(self, machine: str, plan: IsolationPlan, *, may_fork: bool = True) -> None:
        self._code = seccomp.assemble(machine, plan, pid=ME, may_fork=may_fork)
        self._arch = seccomp.ARCHITECTURES[machine]
        every = seccomp.ALLOWED + seccomp.CHECKED + seccomp.NAMESPACED
        self.numbers = seccomp.syscall_numbers(every, machine)

    def __call__(self, name: str | int, *args: int) -> str | int:
        number = self.numbers[name] if isinstance(name, str) else name
        return asked(self._code, number, *args, arch=self._arch)

    def foreign(self) -> str | int:
        return asked(self._code, 1, arch=0x40000003)


@pytest.mark.parametrize("machine", MACHINES)
def test_only_what_is_listed_exists(machine):
    ask = Filtered(machine, NAMESPACED_PLAN)
    listed = {
        **seccomp.syscall_numbers(seccomp.ALLOWED, machine),
        **seccomp.syscall_numbers(seccomp.NAMESPACED, machine),
    }
    looked_at = seccomp.syscall_numbers(seccomp.CHECKED, machine).values()
    for number in [*range(600), 1 << 30, (1 << 30) + 41, (1 << 32) - 1]:
        if number not in looked_at:
            assert ask(number) == (ALLOW if number in listed.values() else errno.ENOSYS), number


X32, ARM_32_ON_64, X86_32 = 0x40000000, 0x40000028, 0x40000003


@pytest.mark.parametrize("plan", [NAMESPACED_PLAN, LANDLOCK_PLAN], ids=["namespaces", "Landlock"])
@pytest.mark.parametrize("machine", MACHINES)
def test_no_number_with_other_bits_set_passes_as_a_listed_one(machine, plan):
    ask = Filtered(machine, plan)
    for name, number in ask.numbers.items():
        for bit in range(9, 32):
            assert ask(number | 1 << bit) == errno.ENOSYS or number | 1 << bit in ask.numbers.values(), (name, bit)
        assert ask(number | X32) == errno.ENOSYS, name


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_of_another_architecture_is_fatal(machine):
    code = seccomp.assemble(machine, NAMESPACED_PLAN, pid=ME, may_fork=True)
    others = {X86_32, ARM_32_ON_64, *seccomp.ARCHITECTURES.values()} - {seccomp.ARCHITECTURES[machine]}
    assert {asked(code, number, arch=arch) for arch in others for number in range(600)} == {KILL}


@pytest.mark.parametrize("machine", MACHINES)
def test_dangerous_calls_are_on_no_list(machine):
    listed = set(seccomp.syscall_numbers(seccomp.ALLOWED + seccomp.CHECKED + seccomp.NAMESPACED, machine))
    refused = (
        "modify_ldt ptrace process_vm_readv memfd_create memfd_secret io_uring_setup bpf unshare setns mount chroot"
    )
    assert not listed & {*refused.split(), "sendmsg", "sendmmsg", "connect", "bind", "listen", "setsockopt", "shmget"}


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_machine_are_fatal(machine):
    assert Filtered(machine, NAMESPACED_PLAN).foreign() == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_are_looked_at(machine):
    ask = Filtered(machine, NAMESPACED_PLAN)
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
    assert ask("fcntl", 3, 1030) == ask("fcntl", 3, 1032) == ALLOW
    assert ask("fcntl", 3, 8) == ask("fcntl", 3, 10) == ask("fcntl", 3, 1031) == errno.EPERM
    assert ask("ioctl", 0, 0x5401) == ALLOW and ask("ioctl", 0, 0x5412) == errno.EPERM
    assert ask("prctl", 15) == ALLOW and ask("prctl", 22) == ask("prctl", 4) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_without_other_walls_against_it_signals_stay_at_home(machine):
    assert (
        Filtered(machine, NAMESPACED_PLAN)("kill", 1)
        == Filtered(machine, LANDLOCK_PLAN._replace(landlock=6))("kill", 1)
        == ALLOW
    )
    ask = Filtered(machine, LANDLOCK_PLAN)
    assert ask("kill", ME) == ask("kill", 0) == ask("tgkill", ME, ME) == ALLOW
    assert ask("kill", 1) == ask("kill", (1 << 32) - 1) == ask("tgkill", 1, 1) == ask("tkill", ME) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_without_namespaces_no_file_is_changed_by_its_name(machine):
    ask = Filtered(machine, LANDLOCK_PLAN)
    assert {ask(number) for number in seccomp.syscall_numbers(seccomp.NAMESPACED, machine).values()} == {errno.ENOSYS}


@pytest.mark.parametrize("machine", MACHINES)
def test_where_processes_cannot_be_counted_there_is_one(machine):
    ask = Filtered(machine, LANDLOCK_PLAN, may_fork=False)
    known = set(ask.numbers) & {"clone", "fork", "vfork"}
    assert {ask(name, 17) for name in known} == {errno.EAGAIN}
    assert Filtered(machine, LANDLOCK_PLAN)("clone", 17) == ALLOW


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
    ours = seccomp.syscall_numbers(seccomp.ALLOWED + seccomp.CHECKED + seccomp.NAMESPACED, machine)
    assert {name: number for name, number in ours.items() if name in defined} == {
        name: defined[name] for name in ours if name in defined
    }
    assert len(set(ours) & set(defined)) > 100 and len(set(ours.values())) == len(ours)
