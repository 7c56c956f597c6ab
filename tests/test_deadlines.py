"""Every wait for another process or machine has a deadline: found in the source, but for those that say why not."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "miles"

# Methods that wait for as long as it takes when they are given nothing.
BARE = {"wait", "join", "get", "communicate", "acquire", "accept", "recv", "recv_bytes"}
# Functions that take a ``timeout``, and wait for as long as it takes without.
TIMED = {
    *("asyncio.wait", "ray.get", "ray.wait", "urllib.request.urlopen", "urlopen", "socket.create_connection"),
    *("subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
    *("dist.init_process_group", "dist.new_group", "TCPStore", "rendezvous", "aiohttp.ClientSession"),
}

HERE = "it waits for a task or thread of this process, which has deadlines of its own"
KILLED = "the process has ended or was killed just before, and the kernel sees to it"
LIFE = "it is what the process or thread is for: it ends when whom it watches or serves does"
STOP = "a server runs until it is told to stop"
LOOP = "--stall-timeout bounds it: of a group, or of the step that lets it go on"
GROUP = "the group it waits in was made with a deadline"
CALLER = "every caller of it has a deadline"
SAID = "there is a message: whoever freezes in the middle of one is ended by --heartbeat-timeout"

MAY_WAIT = {
    ("backends/fsdp/sharded.py", "ShardedModel.save"): GROUP,
    ("backends/fsdp/sharded_value.py", "ShardedValue.save"): GROUP,
    ("backends/native/ring.py", "Ring.sum"): GROUP,
    ("backends/native/ring.py", "Ring._everyones"): GROUP,
    ("backends/native/ring.py", "Ring.broadcast"): GROUP,
    ("backends/native/ring.py", "Ring.gather"): GROUP,
    ("backends/native/ring.py", "Ring.scatter"): GROUP,
    ("backends/native/server/gate.py", "Gate.pass_through"): "a client waits as long as it likes for new weights",
    ("backends/native/server/gate.py", "Gate.closed"): "a client waits as long as it likes for requests to end",
    ("backends/native/server/gate.py", "Gate.empty"): CALLER,
    ("backends/native/server/groups.py", "Groups.receive"): GROUP,
    ("backends/native/server/stream.py", "_Changes.next"): "a client waits as long as it likes for tokens",
    ("backends/sglang/client.py", "Client.attempt"): "a reply may be long: health checks find a server that is stuck",
    ("backends/sglang/client.py", "Client.drained"): "all of them were cancelled just before",
    ("backends/sglang/client.py", "Client.finished"): "all of them were cancelled just before",
    ("backends/sglang/fleet.py", "Fleet._choose"): LOOP,
    ("backends/sglang/fleet.py", "Fleet.news"): "a server that is not there is started with a deadline, or given up",
    ("backends/sglang/guard.py", "main"): LIFE,
    ("backends/sglang/hosted.py", "Warden.wait"): LIFE,
    ("backends/sglang/process.py", "Process.wait"): LIFE,
    ("backends/sglang/process.py", "Process.end"): KILLED,
    ("cluster/crew/asked.py", "Crew._served"): LIFE,
    ("cluster/crew/child.py", "Desk.serve"): LIFE,
    ("cluster/crew/near.py", "Near.close"): KILLED,
    ("cluster/ray/ranks.py", "_callers"): "the socket has a deadline",
    ("cluster/ray/ranks.py", "_proven"): "the socket has a deadline",
    ("cluster/route/router.py", "Router.close"): "it is cancelled when its time has passed",
    ("cluster/team.py", "Line.hear"): LIFE,
    ("cluster/team.py", "_end_with_the_leader"): LIFE,
    ("cluster/team.py", "Team.replies"): SAID,
    ("cluster/team.py", "Team.watch.look"): LIFE,
    ("cluster/team.py", "Team._last_words"): SAID,
    ("cluster/team.py", "Team._end"): KILLED,
    ("launch/rank_trainer.py", "TeamTrainer.lost"): LIFE,
    ("launch/requests.py", "Box.open"): "others take it for a moment, to see whether it is held",
    ("launch/route.py", "_until_stopped"): STOP,
    ("launch/serve.py", "_told_to_stop"): STOP,
    ("launch/supervise.py", "Supervisor._life"): KILLED,
    ("launch/wire.py", "Wired.run"): HERE,
    ("rollout/reward/workers.py", "_Child.end"): KILLED,
    ("rollout/reward/workers.py", "_called"): HERE,
    ("rollout/sandbox/run.py", "_stopped"): "it is only begun there, and waited for with a deadline",
    ("rollout/sandbox/watch.py", "watch"): KILLED,
    ("rollout/session/server/sessions.py", "Sessions.quiet"): CALLER,
    ("rollout/tools/carried.py", "main"): "it runs in a sandbox, which has a wall-clock limit",
    ("rollout/tools/environments/openenv.py", "_Line.ask"): CALLER,
    ("rollout/tools/environments/openenv.py", "_Line.close"): "it was cancelled just before",
    ("rollout/tools/environments/verifiers.py", "VerifiersEnvironment._next"): CALLER,
    ("schedule/gate.py", "Gate.admit"): LOOP,
    ("schedule/loop.py", "Loop.run"): HERE,
    ("schedule/shelf.py", "Shelf.take"): LOOP,
    ("schedule/spares.py", "Spares.cut"): LOOP,
    ("train/checkpoint.py", "Saving.writer"): HERE,
    ("train/checkpoint.py", "Saving.wait"): HERE,
    ("train/checkpoint.py", "save"): HERE,
    ("train/snapshot.py", "Blocks.take"): HERE,
    ("train/tensor_files.py", "FileWriter.wait"): HERE,
    ("train/tensor_files.py", "FileWriter._work"): LIFE,
}


def calls_of(tree: ast.Module) -> Iterator[tuple[str, ast.Call, bool]]:
    """Every call, with the function it is in, and whether something around it has a deadline."""

    def walk(node: ast.AST, path: tuple[str, ...], bounded: bool) -> Iterator[tuple[str, ast.Call, bool]]:
        for child in ast.iter_child_nodes(node):
            inside, held = path, bounded
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = (*path, child.name)
                held = False
            if isinstance(child, ast.AsyncWith):
                held = held or any("timeout(" in ast.unparse(item.context_expr) for item in child.items)
            if isinstance(child, ast.Call):
                yield ".".join(path), child, bounded
                held = held or ast.unparse(child.func) in ("asyncio.wait_for", "wait_for")
            yield from walk(child, inside, held)

    yield from walk(tree, (), False)


def has_deadline(call: ast.Call) -> bool:
    """Is it told how long to wait?"""
    return any(keyword.arg in ("timeout", None) for keyword in call.keywords)


def waits_for_ever(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if any(isinstance(given, ast.Constant) and isinstance(given.value, str) for given in call.args):
        return False  # a key: of a table that is called as a module is
    if name in TIMED:
        return not has_deadline(call)
    if name == "wait":  # that of multiprocessing: of some objects, and perhaps so many seconds
        return len(call.args) < 2 and not has_deadline(call)
    if name.endswith("flock"):
        return "LOCK_NB" not in ast.unparse(call) and "LOCK_UN" not in ast.unparse(call)
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in BARE or has_deadline(call):
        return False
    if call.func.attr == "recv_bytes":  # its argument is a size
        return True
    if call.func.attr == "get" and ast.unparse(call.func.value).isupper():
        return False  # a context variable
    return not call.args and not call.keywords


def found() -> dict[tuple[str, str], int]:
    waits: dict[tuple[str, str], int] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for where, call, bounded in calls_of(ast.parse(path.read_text())):
            if not bounded and waits_for_ever(call):
                waits.setdefault((str(path.relative_to(ROOT)), where), call.lineno)
    return waits


def test_a_wait_without_a_deadline_says_why_it_may_wait_for_ever():
    unknown = {where: line for where, line in found().items() if where not in MAY_WAIT}
    assert not unknown, f"give these waits a deadline, or say in MAY_WAIT why they need none: {unknown}"


def test_every_reason_is_of_a_wait_that_is_there():
    assert not MAY_WAIT.keys() - found().keys()


def test_waits_are_found_however_they_are_written():
    source = """
async def a():
    await event.wait()
    async with asyncio.timeout(3):
        await event.wait()
    await asyncio.wait_for(event.wait(), 3)
    await asyncio.wait({task})
    await asyncio.wait({task}, timeout=3)
class B:
    def c(self):
        self.process.wait()
        self.process.wait(3)
        self.thread.join()
        ", ".join(words)
        queue.get()
        table.get("a")
        wait([one])
        wait([one], 3)
        subprocess.run(words)
        subprocess.run(words, timeout=3)
        pipe.recv_bytes(16)
        fcntl.flock(file, fcntl.LOCK_EX)
"""
    lines = [call.lineno for _, call, bounded in calls_of(ast.parse(source)) if not bounded and waits_for_ever(call)]
    assert lines == [3, 7, 11, 13, 15, 17, 19, 21, 22]
