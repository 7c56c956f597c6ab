"""Every wait for another process or machine in the sources has a deadline, or an entry here that says why not."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "miles"

# Methods that wait without a deadline when they have no argument.
BARE = {"wait", "join", "get", "communicate", "acquire", "accept", "recv", "recv_bytes"}
# Functions that wait without a deadline when they have no ``timeout``.
TIMED = {
    "TCPStore",
    "aiohttp.ClientSession",
    "asyncio.wait",
    "dist.init_process_group",
    "dist.new_group",
    "ray.get",
    "ray.wait",
    "rendezvous",
    "socket.create_connection",
    "subprocess.call",
    "subprocess.check_call",
    "subprocess.check_output",
    "subprocess.run",
    "urllib.request.urlopen",
    "urlopen",
}

HERE = "it waits for a task or thread of this process, which has deadlines of its own"
KILLED = "the process has ended or was killed just before"
CANCELLED = "all of them were cancelled just before"
LIFE = "the process or thread exists for this wait, and ends with what it watches or serves"
STOP = "a server runs until it is stopped"
LOOP = "--stall-timeout bounds it: of a group, or of the step it waits for"
GROUP = "the process group has a timeout"
CALLER = "every caller of it has a deadline"
COMPILES = "its process ends with the run, which waits for it with a deadline"
MESSAGE = "there is a message: a rank that hangs in the middle of one is killed by --heartbeat-timeout"
SOCKET = "the socket has a timeout"

MAY_WAIT = {
    ("cluster/process_group.py", "serve_rendezvous"): "it serves the store, and waits for no rank",
    ("schedule/oversampling.py", "LateGroups.cancel"): CANCELLED,
    ("api/loop_thread.py", "LoopThread.close"): "the loop stops at its next turn",
    ("api/train.py", "train_async"): "a run that was asked to stop ends after its step, and saves",
    ("launch/commands/view.py", "serve_dashboard"): "it serves until a signal",
    ("backends/service/training_loop.py", "TrainingLoop._loop"): "requests come when clients send them",
    ("observe/trackers.py", "TrackerQueue._run"): "records come with the run's events, and closing wakes it",
    ("observe/trackers.py", "TrackerProcess.close"): "the end of a run kills the process after its deadline",
    ("observe/trackers.py", "TrackerProcess.kill"): "the process was killed",
    ("launch/dashboard/process.py", "DashboardProcess.close"): "the process was killed",
    ("models/checkpoint/convert.py", "_write"): "a thread of its own hashes bytes of a local file",
    ("hooks/worker.py", "HookWorker.run"): "its caller has the deadline of the user function, and cancels it",
    ("backends/megatron/model.py", "MegatronModel.save_torch_dist"): GROUP,
    ("backends/native/server/generation.py", "_Changes.wait_next"): "a client waits as long as it likes for tokens",
    (
        "backends/native/server/request_handler.py",
        "RWLock.acquire_read",
    ): "a client waits as long as it likes for new weights",
    (
        "backends/native/server/request_handler.py",
        "RWLock.acquire_write",
    ): "a client waits as long as it likes for requests to end",
    ("backends/native/server/request_handler.py", "RWLock.wait_idle"): CALLER,
    ("backends/native/server/weights/groups.py", "WeightUpdateGroups.receive"): GROUP,
    ("backends/native/tp/communicator.py", "TpCommunicator.broadcast"): GROUP,
    ("backends/native/tp/communicator.py", "TpCommunicator.gather"): GROUP,
    ("backends/native/tp/communicator.py", "TpCommunicator.scatter"): GROUP,
    ("backends/native/tp/communicator.py", "TpCommunicator.sum"): GROUP,
    ("backends/remote/client.py", "SglangClient.drain"): CANCELLED,
    ("backends/remote/client.py", "SglangClient._run"): "health checks find a server that is stuck",
    ("backends/remote/client.py", "SglangClient.generate"): "acquire counts a request of an adapter, and does not wait",
    ("backends/remote/client.py", "SglangClient.wait_idle"): CANCELLED,
    ("backends/remote/pool/engine_pool.py", "EnginePool._choose"): LOOP,
    (
        "backends/remote/pool/engine_pool.py",
        "EnginePool.wait_for_change",
    ): "a server that is gone is restarted with a deadline, or given up",
    ("backends/remote/process/ray_server.py", "RayServerActor.wait"): LIFE,
    ("backends/remote/process/server.py", "ServerProcess.wait"): LIFE,
    ("cluster/process.py", "ChildProcess.kill"): KILLED,
    ("cluster/process.py", "run_guard"): LIFE,
    ("cluster/ray/spmd.py", "_accept_ranks"): SOCKET,
    ("cluster/ray/spmd.py", "_authenticate"): SOCKET,
    ("cluster/router/router.py", "Router.close"): "it is cancelled at its deadline",
    ("cluster/spmd.py", "RankChannel.receive"): LIFE,
    ("cluster/spmd.py", "SpmdGroup._end"): KILLED,
    ("cluster/spmd.py", "SpmdGroup._read_failure"): MESSAGE,
    ("cluster/spmd.py", "SpmdGroup.gather_replies"): MESSAGE,
    ("cluster/spmd.py", "SpmdGroup.watch.wait_for_end"): LIFE,
    ("cluster/spmd.py", "_exit_with_leader"): LIFE,
    ("cluster/workers/local.py", "LocalWorker.close"): CANCELLED,
    ("cluster/workers/pool.py", "WorkerPool._run"): LIFE,
    ("cluster/workers/process.py", "WorkerRequestLoop.serve"): LIFE,
    ("launch/build/run.py", "TrainingRun.run"): HERE,
    ("launch/commands/route.py", "_until_stopped"): STOP,
    ("launch/commands/serve.py", "_wait_for_signal"): STOP,
    ("launch/distributed/driver.py", "DistributedTrainer.wait_for_loss"): LIFE,
    ("launch/elastic/mailbox.py", "Mailbox.open"): "others lock it for a moment only",
    ("launch/precompile/compiler.py", "ParallelCompiler._wait_for_one"): COMPILES,
    ("launch/precompile/kernels.py", "compile_run"): COMPILES,
    ("launch/runtime/supervisor.py", "Supervisor._run_once"): KILLED,
    ("rollout/reward/grader_pool.py", "_call_free_child"): HERE,
    ("rollout/sandbox/monitor.py", "monitor"): KILLED,
    ("rollout/sandbox/run.py", "_stop"): "it is only started there, and awaited with a deadline",
    ("rollout/session/server/registry.py", "SessionRegistry.wait_idle"): CALLER,
    ("rollout/tools/environments/openenv.py", "_WebSocket.close"): CANCELLED,
    ("rollout/tools/environments/openenv.py", "_WebSocket.request"): CALLER,
    ("rollout/tools/environments/verifiers.py", "VerifiersEnvironment._next"): CALLER,
    ("rollout/tools/sandbox_runner.py", "main"): "it runs in a sandbox, which has a wall-clock limit",
    ("schedule/admission.py", "AdmissionControl.admit"): LOOP,
    ("schedule/loop.py", "Loop.run"): HERE,
    ("schedule/oversampling.py", "Oversampling.interrupt"): LOOP,
    ("schedule/reorder_buffer.py", "ReorderBuffer.take"): LOOP,
    ("train/checkpoint/checkpoint.py", "CheckpointSaver.wait"): HERE,
    ("train/checkpoint/checkpoint.py", "CheckpointSaver.start_writer"): HERE,
    ("train/checkpoint/checkpoint.py", "save"): HERE,
    ("train/checkpoint/staging.py", "StagingPool.take"): HERE,
    ("train/checkpoint/writer.py", "ShardWriter._run"): LIFE,
    ("train/checkpoint/writer.py", "ShardWriter.wait"): HERE,
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
    """Does the call have a timeout?"""
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
