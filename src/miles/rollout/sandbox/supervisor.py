"""The small interpreter that runs one program: reads an order, builds the walls, watches, answers, leaves nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from miles.rollout.sandbox import jail, kernel
from miles.rollout.sandbox.child import Place, become
from miles.rollout.sandbox.order import Answer, Order, packed_answer, read_order
from miles.rollout.sandbox.tree import Tree
from miles.rollout.sandbox.watch import Cancelled, Streams, watch

CONTROL, ANSWER = 0, 1
_KILL = 9
_DEEPEST = 100  # folders in folders; the way to each is walked again and again


def main() -> None:
    """An order comes in on standard input, which stays open until its answer has gone out on standard output."""
    try:
        order = read_order(lambda size: os.read(CONTROL, size))
    except EOFError:
        return
    _volunteer_when_memory_is_short()
    if order.plan.namespaces:
        _in_namespaces(order)
    else:
        _in_place(order)


def _in_namespaces(order: Order) -> None:
    ids = jail.enter(order.plan.namespaces)
    first = os.fork()  # the first process of the namespace: when it ends, the kernel ends all others
    if first:
        _, status = os.waitpid(first, 0)
        sys.exit(status != 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, _KILL)
    outer = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    inner = jail.build(order.readable, scratch_bytes=order.bounds.scratch, ids=ids)
    tree = Tree(outer if inner is None else inner, first=True, own=inner is not None)
    ours = 0 if ids.groups else 2  # without root, this process and its parent are the program's user as well
    place = Place(jail.SCRATCH, ids, order.bounds.processes + ours + 1)
    _answer(lambda: supervise(order, place, tree, lambda: False))


def _in_place(order: Order) -> None:
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    tree = Tree(os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), first=False, own=False)
    ids = jail.spare_ids() if order.plan.apart else None
    scratch = os.path.join(order.temporary, f"miles-sandbox-{os.urandom(8).hex()}")
    os.mkdir(scratch, 0o700)
    place = Place(scratch, ids, _tasks(order, ids))
    try:
        _answer(lambda: supervise(order, place, tree, lambda: not fits(scratch, order.bounds.scratch - tree.hidden())))
    finally:
        tree.kill()
        clear(scratch)


def _answer(run: Callable[[], Answer]) -> None:
    try:
        answer = run()
    except Cancelled:
        return
    data = memoryview(packed_answer(answer))
    while data:
        data = data[os.write(ANSWER, data) :]


def supervise(order: Order, place: Place, tree: Tree, crowded: Callable[[], bool]) -> Answer:
    """Start the program, watch it to its end."""
    lay_out(order, place)
    pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "fault")}
    child = os.fork()
    if child == 0:
        streams = (pipes["stdin"][0], pipes["stdout"][1], pipes["stderr"][1])
        become(order, place, streams=streams, fault=pipes["fault"][1])
    for theirs in (pipes["stdin"][0], pipes["stdout"][1], pipes["stderr"][1], pipes["fault"][1]):
        os.close(theirs)
    if fault := os.read(pipes["fault"][0], 1 << 12):  # empty when exec closed it: the program runs
        os.waitpid(child, 0)
        return Answer(error=fault.decode(errors="replace"))
    streams = Streams(
        stdin=pipes["stdin"][1],
        stdout=pipes["stdout"][0],
        stderr=pipes["stderr"][0],
        control=CONTROL,
        text=order.stdin,
        most=order.bounds.output,
    )
    return watch(child, streams, order.bounds, tree, crowded)


def lay_out(order: Order, place: Place) -> None:
    """Put the order's files into the scratch folder, as the program's own."""
    own = [place.scratch]
    for name, body in order.files.items():
        *folders, last = name.split("/")
        at = place.scratch
        for folder in folders:
            at = f"{at}/{folder}"
            if not os.path.isdir(at):
                os.mkdir(at, 0o700)
                own.append(at)
        file = os.open(f"{at}/{last}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(body)
            while rest:
                rest = rest[os.write(file, rest) :]
        finally:
            os.close(file)
        own.append(f"{at}/{last}")
    if place.ids is not None:
        for path in own:
            os.chown(path, place.ids.uid, place.ids.gid)


def clear(folder: str) -> None:
    """Remove a folder, however deep and whatever its modes: what is inside a folder is moved up before it goes."""
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
                    os.chmod(child, 0o700, dir_fd=inner)  # a folder that may not be written to cannot be moved
                os.rename(child, f"{prefix}{moved}", src_dir_fd=inner, dst_dir_fd=top)
                moved += 1
            os.close(inner)
            os.rmdir(name, dir_fd=top)
    os.close(top)
    os.rmdir(folder)


def fits(folder: str, most: int) -> bool:
    """Whether all files together, their number and depth are within bounds. What cannot be looked at is not."""
    ahead, bytes_used, count = [(folder, 0)], 0, 0
    while ahead:
        place, depth = ahead.pop()
        try:
            entries = list(os.scandir(place))
        except FileNotFoundError:
            continue  # gone meanwhile
        except OSError:
            return False  # closed to us, and on purpose
        count += len(entries)
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                bytes_used += entry.stat(follow_symlinks=False).st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
                ahead.append((entry.path, depth + 1))
        if bytes_used > most or count > jail.INODES or depth > _DEEPEST:
            return False
    return True


def _tasks(order: Order, ids: jail.Ids | None) -> int | None:
    """How many processes its user may have. Root's cannot be bounded, so there the program may start none."""
    most = order.bounds.processes + 1
    if ids is not None:
        return most
    return None if os.getuid() == 0 else most + _tasks_of_this_user()


def _tasks_of_this_user() -> int:
    me, count = os.getuid(), 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                count += len(os.listdir(f"/proc/{entry.name}/task")) if entry.stat().st_uid == me else 0
            except OSError:
                continue  # ended meanwhile
    return count


def _volunteer_when_memory_is_short() -> None:
    """Let the kernel end a program of a model before anything of the run."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")
    except OSError:
        return  # a courtesy, not a wall
