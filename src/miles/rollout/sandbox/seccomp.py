"""Seccomp filter: the syscalls a sandboxed program may make, as a hand-assembled classic BPF program.

A syscall is allowed, allowed with some arguments only, or answered with ENOSYS, which C libraries handle. So there is
no io_uring, ptrace, mount, unshare, bpf, keyring, userfaultfd, memfd, shared memory, message queue, inotify or pidfd,
nor what later kernels add; and no ``sendmsg``, since descriptors in messages would escape the accounting of memory.
``clone3`` is refused because a filter cannot read its flags; libraries fall back to ``clone``. The program cannot
remove the filter, and its children inherit it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from miles.rollout.sandbox import libc
from miles.rollout.sandbox.landlock import SCOPES_SIGNALS
from miles.rollout.sandbox.protocol import IsolationPlan

ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD = 0x20
_AND = 0x54
_JUMP_EQUAL = 0x15
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERROR = 0x00050000
# offsets in struct seccomp_data
_NUMBER = 0
_ARCHITECTURE = 4
_ARGS = 16
_WORD = 0xFFFFFFFF

_NEW_NAMESPACES = 0x7E020080
_AF_UNIX = 1
_SOCK_STREAM = 1
_SOCK_SEQPACKET = 5
_SOCK_KIND = 0xF
_ACCESS, _TRUNCATE = 0o3, 0o1000
# get and set flags, locks of files, sizes of pipes (read); not the owner of a file's signals
_FCNTL = (*range(8), 36, 37, 38, 1030, 1032)
# terminal settings and size (read), bytes waiting, non-blocking, close-on-exec
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# dumpable (read), thread names, capabilities (read), names of memory areas
_PRCTL = (3, 15, 16, 23, 0x53564D41)


class ArgCheck(NamedTuple):
    """A 32-bit word of an argument, masked, must be one of these values."""

    arg: int
    values: tuple[int, ...]
    mask: int = _WORD
    high: bool = False


class SyscallRule(NamedTuple):
    """A syscall that is allowed when every check holds, and otherwise fails with ``error``."""

    checks: tuple[ArgCheck, ...]
    error: int = errno.EPERM


NEVER = ArgCheck(0, ())
Instruction = tuple[int, int, int, int]


# Syscalls as name=x86-64/arm64 number (``-``: absent).
ALLOWED = """
read=0/63 write=1/64 readv=19/65 writev=20/66 pread64=17/67 pwrite64=18/68 preadv=295/69 pwritev=296/70
preadv2=327/286 pwritev2=328/287 lseek=8/62 close=3/57 close_range=436/436 dup=32/23 dup2=33/- dup3=292/24
pipe=22/- pipe2=293/59 stat=4/- fstat=5/80 lstat=6/- newfstatat=262/79 statx=332/291 statfs=137/43
fstatfs=138/44 access=21/- faccessat=269/48 faccessat2=439/439 readlink=89/- readlinkat=267/78 getcwd=79/17
chdir=80/49 fchdir=81/50 getdents=78/- getdents64=217/61 getxattr=191/8 lgetxattr=192/9 fgetxattr=193/10
listxattr=194/11 llistxattr=195/12 flistxattr=196/13 mkdir=83/- mkdirat=258/34 rmdir=84/- unlink=87/-
unlinkat=263/35 rename=82/- renameat=264/38 renameat2=316/276 link=86/- linkat=265/37 symlink=88/-
symlinkat=266/36 creat=85/- ftruncate=77/46 fallocate=285/47 fsync=74/82 fdatasync=75/83 fadvise64=221/223
copy_file_range=326/285 sendfile=40/71 flock=73/32 umask=95/166 mmap=9/222 munmap=11/215 mprotect=10/226
mremap=25/216 madvise=28/233 msync=26/227 mincore=27/232 brk=12/214 mseal=462/462 map_shadow_stack=453/453
futex=202/98 futex_waitv=449/449 set_robust_list=273/99 get_robust_list=274/100 set_tid_address=218/96
rseq=334/293 membarrier=324/283 restart_syscall=219/128 arch_prctl=158/- getpid=39/172 gettid=186/178
getppid=110/173 getpgid=121/155 getpgrp=111/- getsid=124/156 setpgid=109/154 setsid=112/157 getuid=102/174
geteuid=107/175 getgid=104/176 getegid=108/177 getresuid=118/148 getresgid=120/150 getgroups=115/158
uname=63/160 sysinfo=99/179 getcpu=309/168 getrusage=98/165 times=100/153 getrlimit=97/163 setrlimit=160/164
sched_yield=24/124 sched_getaffinity=204/123 sched_getparam=143/121 sched_getscheduler=145/120
sched_get_priority_max=146/125 sched_get_priority_min=147/126 getpriority=140/141 clock_gettime=228/113
clock_getres=229/114 clock_nanosleep=230/115 nanosleep=35/101 gettimeofday=96/169 time=201/- getitimer=36/102
setitimer=38/103 alarm=37/- timer_create=222/107 timer_settime=223/110 timer_gettime=224/108
timer_getoverrun=225/109 timer_delete=226/111 timerfd_create=283/85 timerfd_settime=286/86
timerfd_gettime=287/87 rt_sigaction=13/134 rt_sigprocmask=14/135 rt_sigreturn=15/139 rt_sigsuspend=130/133
rt_sigpending=127/136 rt_sigtimedwait=128/137 sigaltstack=131/132 signalfd=282/- signalfd4=289/74 pause=34/-
execve=59/221 execveat=322/281 exit=60/93 exit_group=231/94 wait4=61/260 waitid=247/95 getrandom=318/278
poll=7/- ppoll=271/73 select=23/- pselect6=270/72 epoll_create=213/- epoll_create1=291/20 epoll_ctl=233/21
epoll_wait=232/- epoll_pwait=281/22 epoll_pwait2=441/441 eventfd=284/- eventfd2=290/19 recvfrom=45/207
recvmsg=47/212 shutdown=48/210 getsockopt=55/209 getsockname=51/204 getpeername=52/205
"""

# allowed with some arguments only: see ``build_rules``
CHECKED = """
open=2/- openat=257/56 clone=56/220 fork=57/- vfork=58/- socketpair=53/199 sendto=44/206 prlimit64=302/261
prctl=157/167 ioctl=16/29 fcntl=72/25 kill=62/129 tkill=200/130 tgkill=234/131
socket=41/198
"""

# allowed in namespaces only, where all files are the program's own: Landlock does not restrict changes of mode or time
NAMESPACED = """
chmod=90/- fchmod=91/52 fchmodat=268/53 fchmodat2=452/452 utime=132/- utimes=235/- futimesat=261/-
utimensat=280/88 truncate=76/45
"""


def syscall_numbers(names: str, machine: str) -> Mapping[str, int]:
    """Map the listed syscalls to their numbers on ``machine``, without those it lacks."""
    column = ("x86_64", "aarch64").index(machine)
    rows = [entry.partition("=") for entry in names.split()]
    return {name: int(known) for name, _, pair in rows if (known := pair.split("/")[column]) != "-"}


def build_rules(plan: IsolationPlan, *, pid: int, may_fork: bool) -> dict[str, SyscallRule]:
    """Rules of the syscalls whose arguments are checked. ``pid`` is the program's own."""
    open_flags = (0, 1, 2, 1 | _TRUNCATE, 2 | _TRUNCATE)  # O_TRUNC only with write access
    fork = SyscallRule((), errno.EAGAIN) if may_fork else SyscallRule((NEVER,), errno.EAGAIN)
    rules = {
        "open": SyscallRule((ArgCheck(1, open_flags, _ACCESS | _TRUNCATE),)),
        "openat": SyscallRule((ArgCheck(2, open_flags, _ACCESS | _TRUNCATE),)),
        "clone": SyscallRule((ArgCheck(0, (0,), _NEW_NAMESPACES),)) if may_fork else fork,
        "fork": fork,
        "vfork": fork,
        "socket": SyscallRule((NEVER,)),
        # a connected pair only: a datagram socket could be pointed elsewhere by each message
        "socketpair": SyscallRule((ArgCheck(0, (_AF_UNIX,)), ArgCheck(1, (_SOCK_STREAM, _SOCK_SEQPACKET), _SOCK_KIND))),
        "sendto": SyscallRule((ArgCheck(4, (0,)), ArgCheck(4, (0,), high=True))),
        "prlimit64": SyscallRule((ArgCheck(0, (0,)),)),
        "prctl": SyscallRule((ArgCheck(0, _PRCTL),)),
        "ioctl": SyscallRule((ArgCheck(1, _IOCTL),)),
        "fcntl": SyscallRule((ArgCheck(1, _FCNTL),)),
    }
    if plan.namespaces or plan.apart or plan.landlock >= SCOPES_SIGNALS:  # its signals reach only its own processes
        return rules | dict.fromkeys(("kill", "tkill", "tgkill"), SyscallRule(()))
    return rules | {
        "kill": SyscallRule((ArgCheck(0, (0, pid)),)),
        "tgkill": SyscallRule((ArgCheck(0, (pid,)),)),
        "tkill": SyscallRule((NEVER,)),
    }


def assemble(machine: str, plan: IsolationPlan, *, pid: int, may_fork: bool) -> list[Instruction]:
    """Assemble the BPF instructions."""
    allowed = dict(syscall_numbers(ALLOWED, machine))
    if plan.namespaces:
        allowed |= syscall_numbers(NAMESPACED, machine)
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in sorted(allowed.values()):
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    rules = build_rules(plan, pid=pid, may_fork=may_fork)
    for name, number in syscall_numbers(CHECKED, machine).items():
        body = _assemble_rule(rules[name])
        code += [(_JUMP_EQUAL, 0, len(body), number), *body]
    return [*code, (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]


def install(plan: IsolationPlan, *, may_fork: bool) -> None:
    """Install the filter in this process; needs no_new_privs."""
    code = assemble(os.uname().machine, plan, pid=os.getpid(), may_fork=may_fork)
    body = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(body)))
    libc.prctl(libc.PR_SET_SECCOMP, 2, ctypes.addressof(program))


def _assemble_rule(rule: SyscallRule) -> Sequence[Instruction]:
    refuse: Instruction = (_RETURN, 0, 0, _ERROR | rule.error)
    body: list[Instruction] = []
    for check in rule.checks:
        body.append((_LOAD, 0, 0, _ARGS + 8 * check.arg + 4 * check.high))
        if check.mask != _WORD:
            body.append((_AND, 0, 0, check.mask))
        count = len(check.values)
        body += [(_JUMP_EQUAL, count - at, 0, value) for at, value in enumerate(check.values)]
        body.append(refuse)
    return [*body, (_RETURN, 0, 0, _ALLOW)]
