"""Sandbox supervisor: a small interpreter that isolates, runs and monitors one program, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from miles.rollout.sandbox import libc, namespaces
from miles.rollout.sandbox.child import ChildSetup, exec_program
from miles.rollout.sandbox.monitor import Cancelled, PipeStreams, ScratchFolder, monitor
from miles.rollout.sandbox.process_tree import ProcessTree
from miles.rollout.sandbox.protocol import RunRequest, SandboxResult, encode_result, read_request

CONTROL, RESULT = 0, 1
_MAX_DEPTH = 100  # nested folders; each is walked repeatedly


def main() -> None:
    """Read a request from standard input, which stays open until the result is written to standard output."""
    try:
        request = read_request(lambda size: os.read(CONTROL, size))
    except EOFError:
        return
    _raise_oom_score()
    _ignore_signals()
    if request.plan.namespaces == "bubblewrap":
        _run_in_bubblewrap(request)
    elif request.plan.namespaces:
        _run_in_namespaces(request)
    else:
        _run_without_namespaces(request)


def _run_in_namespaces(request: RunRequest) -> None:
    ids = namespaces.enter(request.plan.namespaces)
    first = os.fork()  # the first process of the namespace: when it ends, the kernel ends all others
    if first:
        _, status = os.waitpid(first, 0)
        sys.exit(status != 0)
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    outer = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    inner = namespaces.build_root(request.readable, scratch_bytes=request.limits.scratch, ids=ids)
    tree = ProcessTree(outer if inner is None else inner, first=True, own=inner is not None)
    _run_as_first_process(request, ids, tree)


def _run_in_bubblewrap(request: RunRequest) -> None:
    """Run as the first process of namespaces that bwrap made."""
    ids = namespaces.bubblewrap_ids()
    processes = namespaces.finish_bubblewrap_root(scratch_bytes=request.limits.scratch, ids=ids)
    _run_as_first_process(request, ids, ProcessTree(processes, first=True, own=True))


def _run_as_first_process(request: RunRequest, ids: namespaces.Ids, tree: ProcessTree) -> None:
    ours = 0 if ids.groups else 2  # without root, this process and its parent are the program's user as well
    setup = ChildSetup(namespaces.SCRATCH, ids, _count_processes(request) + ours + 1)
    scratch = ScratchFolder(memory=lambda: _count_used_bytes(namespaces.SCRATCH), is_full=lambda: False)
    _send_result(lambda: supervise(request, setup, tree, scratch))


def _run_without_namespaces(request: RunRequest) -> None:
    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
    tree = ProcessTree(os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), first=False, own=False)
    ids = namespaces.spare_ids() if request.plan.apart else None
    scratch = os.path.join(request.temporary, f"miles-sandbox-{os.urandom(8).hex()}")
    os.mkdir(scratch, 0o700)
    setup = ChildSetup(scratch, ids, _task_limit(request, ids))
    on_disk = ScratchFolder(
        memory=lambda: 0, is_full=lambda: not fits_limits(scratch, request.limits.scratch - tree.hidden())
    )
    try:
        _send_result(lambda: supervise(request, setup, tree, on_disk))
    finally:
        tree.kill()
        remove_tree(scratch)


def _send_result(run: Callable[[], SandboxResult]) -> None:
    try:
        answer = run()
    except Cancelled:
        return
    data = memoryview(encode_result(answer))
    while data:
        data = data[os.write(RESULT, data) :]


def supervise(request: RunRequest, setup: ChildSetup, tree: ProcessTree, scratch: ScratchFolder) -> SandboxResult:
    """Start the program, and its companion if it has one, and monitor it to its end."""
    write_files(request, setup)
    pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "calls", "answers")}
    (stdin, _), (_, stdout), (_, stderr) = pipes["stdin"], pipes["stdout"], pipes["stderr"]
    calls, answers = pipes["calls"], pipes["answers"]
    limits = request.limits
    if request.companion:
        limits = limits._replace(processes=_count_processes(request))
        _, fault = _start(request, request.companion, setup, (calls[0], answers[1], stderr))
        if fault:
            return SandboxResult(error=fault)
    streams = (stdin, stdout, stderr, *((answers[0], calls[1]) if request.companion else ()))
    child, fault = _start(request, request.argv, setup, streams)
    if fault:
        return SandboxResult(error=fault)
    for child_end in (stdin, stdout, stderr, *calls, *answers):
        os.close(child_end)
    our_ends = PipeStreams(
        stdin=pipes["stdin"][1],
        stdout=pipes["stdout"][0],
        stderr=pipes["stderr"][0],
        control=CONTROL,
        text=request.stdin,
        max_output=limits.output,
    )
    return monitor(child, our_ends, limits, tree, scratch)


def _start(request: RunRequest, argv: tuple[str, ...], setup: ChildSetup, streams: tuple[int, ...]) -> tuple[int, str]:
    """Start a program with these descriptors as 0, 1, 2 and so on; returns its process id, and why it did not start."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        exec_program(request, argv, setup, streams=streams, fault=writing)
    os.close(writing)
    fault = os.read(reading, 1 << 12)  # empty when exec closed it: the program runs
    os.close(reading)
    if fault:
        os.waitpid(child, 0)
    return child, fault.decode(errors="replace")


def write_files(request: RunRequest, setup: ChildSetup) -> None:
    """Write the request's files into the scratch folder, owned by the program's user."""
    owned = [setup.scratch]
    for name, body in request.files.items():
        *folders, last = name.split("/")
        at = setup.scratch
        for folder in folders:
            at = f"{at}/{folder}"
            if not os.path.isdir(at):
                os.mkdir(at, 0o700)
                owned.append(at)
        file = os.open(f"{at}/{last}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(body)
            while rest:
                rest = rest[os.write(file, rest) :]
        finally:
            os.close(file)
        owned.append(f"{at}/{last}")
    if setup.ids is not None:
        for path in owned:
            os.chown(path, setup.ids.uid, setup.ids.gid)


def remove_tree(folder: str) -> None:
    """Remove a folder of any depth and any modes: the contents of each subfolder are moved up before it is removed."""
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    prefix, moved = os.urandom(8).hex(), 0
    while names := os.listdir(top):
        for name in names:
            try:
                os.unlink(name, dir_fd=top)
                continue
            except IsADirectoryError:
                os.chmod(name, 0o700, dir_fd=top)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
            for child in os.listdir(inner):
                if os.stat(child, dir_fd=inner, follow_symlinks=False).st_mode & 0o170000 == 0o040000:
                    os.chmod(child, 0o700, dir_fd=inner)  # a read-only folder cannot be moved
                os.rename(child, f"{prefix}{moved}", src_dir_fd=inner, dst_dir_fd=top)
                moved += 1
            os.close(inner)
            os.rmdir(name, dir_fd=top)
    os.close(top)
    os.rmdir(folder)


def _count_used_bytes(folder: str) -> int:
    """Bytes that the file system of a folder holds, deleted files that are open included."""
    system = os.statvfs(folder)
    return (system.f_blocks - system.f_bfree) * system.f_frsize


def fits_limits(folder: str, limit: int) -> bool:
    """Whether size, number and depth of all files are within limits. What cannot be inspected is not."""
    pending = [(folder, 0)]
    bytes_used = 0
    count = 0
    while pending:
        setup, depth = pending.pop()
        try:
            entries = list(os.scandir(setup))
        except FileNotFoundError:
            continue  # gone meanwhile
        except OSError:
            return False  # the program closed it to us
        count += len(entries)
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                bytes_used += entry.stat(follow_symlinks=False).st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
                pending.append((entry.path, depth + 1))
        if bytes_used > limit or count > namespaces.INODES or depth > _MAX_DEPTH:
            return False
    return True


def _count_processes(request: RunRequest) -> int:
    """How many processes the program and its companion may have together."""
    return request.limits.processes + bool(request.companion)


def _task_limit(request: RunRequest, ids: namespaces.Ids | None) -> int | None:
    """How many processes its user may have. Root's cannot be limited, so root's program may start none."""
    limit = _count_processes(request) + 1
    if ids is not None:
        return limit
    return None if os.getuid() == 0 else limit + _count_user_tasks()


def _count_user_tasks() -> int:
    me, count = os.getuid(), 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                count += len(os.listdir(f"/proc/{entry.name}/task")) if entry.stat().st_uid == me else 0
            except OSError:
                continue  # ended meanwhile
    return count


def _ignore_signals() -> None:
    """Ignore every signal: a program with our user id may send them, and the kernel keeps from the first process of a
    namespace only those it has no handler for. SIGCHLD keeps its default, since ignoring it would hide exit statuses.
    """
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)


def _raise_oom_score() -> None:
    """Make the kernel's OOM killer prefer the program to the run."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")
    except OSError:
        return  # best effort
