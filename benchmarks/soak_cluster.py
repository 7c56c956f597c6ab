"""Soak test of a whole run: served engines, a router and an agent's session server, fuzzed, killed and starved at once.

    python -m benchmarks.soak_cluster [--minutes 60] [--seed 0] [--keep FOLDER]

Two ``miles serve`` processes behind ``miles route``, and a ``miles train`` with two served engines, whose trajectories
come from an agent over the session server. For so many minutes, at the same time:

- malformed requests and raw bytes go to every port: both servers, the router, the session server, the run's engines;
- processes are killed or frozen: engines and trainer ranks of the run, the run itself, servers behind the router;
- CPU burners take every core, and the disk of the run fills up (a tmpfs, where this process is root);
- a client repeats seeded requests through the router and compares each response with the undisturbed one.

In the end: does every prompt have exactly one outcome, is every exit status the documented one, was no reply a 500, was
every complete response the undisturbed one, and did memory, descriptors and threads of the long-lived processes stay?
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.bench_chaos import Here, count_steps, find_driver, flags, write_inputs
from benchmarks.chaos_ray_cluster import MARK, ROOT, find_marked_processes, processes
from benchmarks.chaos_report import summarize_run

from miles.cluster import stack_dump

ADDRESS_FILE = "MILES_SOAK_ADDRESS"
DISK_MIB = 96
STATUSES = {"term": {143, 137}, "end": {143}}
"""Exit statuses of a run by what ended it; after a kill or a full disk its supervisor restarts it, unless it stops."""
END_SECONDS = 120.0
"""Within this time after SIGTERM, a run has finished its step, saved and ended."""
QUIET_SECONDS = 90.0
"""Within this time after the last client has gone, the router has closed their connections."""
SERVER_STATUSES = {0, -signal.SIGTERM}
"""A server finishes its requests and ends with 0; one that is still starting is ended by the signal."""
STRIKES = ("engine kill", "engine kill", "engine freeze", "rank kill", "run kill", "run term", "server", "cpu", "disk")
PATHS = (
    *("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/health", "/get_load", "/server_info"),
    *("/tokenize", "/sessions/none", "/metrics", "/flush_cache", "/abort_request", "/engines", "/openapi.json"),
)


async def ask_twice(base_url: str, prompt: list[dict[str, Any]], request_kwargs: dict[str, Any], metadata: Any) -> None:
    """The agent of the run: two turns over the session server, whose address it writes down for the fuzzer."""
    Path(os.environ[ADDRESS_FILE]).write_text(base_url)
    messages = list(prompt)
    async with aiohttp.ClientSession() as client:
        for turn in range(2):
            body = {"model": "policy", "messages": messages, **request_kwargs}
            async with client.post(f"{base_url}/v1/chat/completions", json=body) as response:
                if response.status == 400 and turn:
                    return  # the conversation is longer than the context
                if response.status != 200:
                    raise RuntimeError(f"turn {turn}: status {response.status}")
                choice = (await response.json())["choices"][0]
            if choice["finish_reason"] == "length":
                return
            messages += [{"role": "assistant", "content": choice["message"]["content"] or ""}]
            messages += [{"role": "user", "content": "abc"}]


@dataclass
class Findings:
    """Everything that is reported in the end."""

    requests: Counter[str] = field(default_factory=Counter)
    server_errors: list[str] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    compared_errors: set[str] = field(default_factory=set)
    strikes: Counter[str] = field(default_factory=Counter)
    lives: list[tuple[str, int]] = field(default_factory=list)
    usage: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Process -> (resident KiB, descriptors, threads) over time."""
    problems: list[str] = field(default_factory=list)


class Server:
    """``miles serve`` or ``miles route`` in a process, started again on its port when it was killed."""

    def __init__(self, name: str, words: list[str], mark: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.name = name
        self._words = [sys.executable, "-m", "miles.launch.main", *words, "--port", str(self.port)]
        self._env = _environment(mark)
        self.start()

    def start(self) -> None:
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(self._words, stdout=null, stderr=null, env=self._env, cwd=ROOT)

    def wait(self) -> None:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            with suppress(OSError, http.client.HTTPException):
                if _request(self.port, "GET", "/health", b"", {}, 5)[0] == 200:
                    return
            time.sleep(0.2)
        raise SystemExit(f"{self.name} did not start")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            return self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def _environment(mark: str, **more: str) -> dict[str, str]:
    path = f"{ROOT}:{ROOT / 'src'}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, MARK: mark, **more}


def _request(
    port: int, method: str, path: str, body: bytes, headers: dict[str, str], timeout: float
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def mutate(chance: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """A request that is wrong in some way."""
    value: Any = chance.choice(
        [None, -1, 1e308, -1e-300, "", "x" * 4000, [], [[]], {"a": {}}, True, 2**63, "\ud800", [1, -5, 10**9]]
    )
    body: dict[str, Any] = {
        "input_ids": [5, 7, 9],
        "messages": [{"role": "user", "content": "ab"}],
        "sampling_params": {"max_new_tokens": 3, "temperature": 1.0},
        "model": "any",
        "max_tokens": 3,
    }
    key = chance.choice([*body, "stream", "rid", "stop", "n", "logprobs", "text", "tools"])
    if chance.random() < 0.5:
        body[key] = value
    else:
        name = chance.choice(["temperature", "top_p", "top_k", "stop_regex", "repetition_penalty", "stop"])
        body["sampling_params"] = {"max_new_tokens": 3, name: value}
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    if chance.random() < 0.2:
        raw = bytes(chance.randrange(256) for _ in range(chance.randrange(200)))
    elif chance.random() < 0.2:
        at = chance.randrange(len(raw))
        raw = raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]
    headers = {"Content-Type": chance.choice(["application/json", "text/plain", "application/x\xff"])}
    if chance.random() < 0.1:
        headers["Content-Encoding"] = chance.choice(["gzip", "br", "nothing"])
    if chance.random() < 0.1:
        headers["Authorization"] = chance.choice(["Bearer wrong", "Basic \xff", ""])
    return chance.choice(["POST", "POST", "POST", "GET", "DELETE", "PUT"]), chance.choice(PATHS), raw, headers


def send_raw(port: int, chance: random.Random) -> None:
    """Bytes that are no HTTP, headers that never end, or a body that is cut off."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as wire:
        kind = chance.randrange(3)
        if kind == 0:
            wire.sendall(bytes(chance.randrange(256) for _ in range(chance.randrange(1, 400))))
        elif kind == 1:
            wire.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"a" * chance.randrange(200))
        else:
            wire.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{")
        wire.settimeout(0.2)
        with suppress(OSError):
            wire.recv(1024)


class Soak:
    """Everything that goes on at the same time, until ``end``."""

    def __init__(self, folder: Path, minutes: float, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.end = time.monotonic() + 60 * minutes
        self.mark = f"soak{os.getpid()}"
        self.found = Findings()
        self.address = folder / "session_server"
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.is_small_disk = (
            os.geteuid() == 0
            and not subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(self.disk)], check=False
            ).returncode
        )
        self.run = self.disk / "run"
        self.life: subprocess.Popen[bytes] | None = None
        self.ended_by = "end"
        self.steps_seen = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end

    def start(self) -> None:
        model = write_inputs(self.folder / "inputs")
        serve = ["serve", str(model), "--engine-kv-tokens", "4096", "--device", "cpu"]
        self.servers = [Server(f"server {n}", serve, self.mark) for n in (1, 2)]
        urls = [f"http://127.0.0.1:{server.port}" for server in self.servers]
        checks = ["--health-check-interval-secs", "1"]
        self.router = Server("router", ["route", *urls, *checks], self.mark)
        for server in (*self.servers, self.router):
            server.wait()
        self.idle_descriptors = read_usage(self.router.process.pid)[1]
        self.command = flags(model, self.run, steps=100_000, reward="tests.launch.small_run:shared_letters")
        self.command += ["--custom-agent-function-path", "benchmarks.soak_cluster:ask_twice"]
        self.command += ["--keep-rollouts", "8", "--max-reward-failures", "100000"]

    def live(self) -> None:
        """Start the run again whenever it has ended, until the time is over; then stop it, and let it be complete."""
        log = (self.folder / "run.txt").open("ab")
        env = _environment(self.mark, **{ADDRESS_FILE: str(self.address)})
        while not self.is_over:
            self.ended_by = "end"
            words = [sys.executable, "-m", "miles.launch.main", "train", *self.command]
            self.life = subprocess.Popen(words, stdout=log, stderr=log, env=env, cwd=ROOT)
            while self.life.poll() is None and not self.is_over:
                time.sleep(0.2)
            if self.is_over and self.life.poll() is None:
                self.life.terminate()
                try:
                    self.life.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    self._explain_late_end(self.life.pid)
            self.life.kill()
            code = self.life.wait()
            self.found.lives.append((self.ended_by, code if code >= 0 else 128 - code))
            self._free_disk()
        log.close()

    def _explain_late_end(self, supervisor: int) -> None:
        """Keep the logs of a run that did not end in time, with the stacks of its processes."""
        for pid in find_driver(supervisor):
            with suppress(OSError):
                os.kill(pid, stack_dump.DUMP_SIGNAL)
        time.sleep(3)
        shutil.copytree(self.run / "logs", self.folder / "late", dirs_exist_ok=True)
        self.found.problems.append(f"the run did not end within {END_SECONDS:g} s of SIGTERM; see {self.folder}/late")

    def strike(self) -> None:
        """Every few seconds a process is killed or frozen, the CPU is taken, or the disk is filled."""
        chance = random.Random(self.seed)
        while not self.is_over:
            time.sleep(chance.uniform(5, 20))
            kind = chance.choice(STRIKES)
            if getattr(self, "_" + kind.split()[0])(kind, chance):
                self.found.strikes[kind] += 1

    def _engine(self, kind: str, chance: random.Random) -> bool:
        if self.life is None or self.life.poll() is not None:
            return False
        if not self._has_progressed() and chance.random() < 0.8:
            return False  # most engines are struck in the middle of a run, some while it starts
        whom, how = kind.split()
        return Here().strike(self.life.pid, whom, "killed" if how == "kill" else "frozen") is not None

    _rank = _engine

    def _run(self, kind: str, chance: random.Random) -> bool:
        if self.life is None or not self._has_progressed():
            return False
        if "term" in kind:
            self.ended_by = "term"
            self.life.terminate()
            return True
        drivers = [pid for pid, parent, _ in processes() if parent == self.life.pid]
        return self._signal(drivers, signal.SIGKILL, chance)

    def _server(self, kind: str, chance: random.Random) -> bool:
        server = chance.choice(self.servers)
        if chance.random() < 0.5:
            server.process.kill()
            server.process.wait()
            server.start()
        else:
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(1, 8))
            server.process.send_signal(signal.SIGCONT)
        return True

    def _cpu(self, kind: str, chance: random.Random) -> bool:
        burn = "import time\nend = time.time() + 15\nwhile time.time() < end: pass"
        burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2 * (os.cpu_count() or 1))]
        for burner in burners:
            burner.wait()
        return True

    def _disk(self, kind: str, chance: random.Random) -> bool:
        if not self.is_small_disk or not self._has_progressed():
            return False
        with suppress(OSError), (self.disk / "filler").open("wb") as filler:
            while True:
                filler.write(bytes(1 << 20))
                filler.flush()
        time.sleep(chance.uniform(5, 20))
        self._free_disk()
        return True

    def _has_progressed(self) -> bool:
        """Has the run made a step since it was last struck?"""
        now = count_steps(self.run)
        progressed, self.steps_seen = now > self.steps_seen, now
        return progressed

    def _free_disk(self) -> None:
        (self.disk / "filler").unlink(missing_ok=True)

    def _marked(self) -> set[int]:
        return set(find_marked_processes(self.mark))

    def _signal(self, victims: list[int], number: signal.Signals, chance: random.Random) -> bool:
        with suppress(ProcessLookupError):
            if victims:
                os.kill(chance.choice(victims), number)
                return True
        return False

    def fuzz(self, number: int) -> None:
        chance = random.Random(f"{self.seed}-{number}")
        while not self.is_over:
            name, port = chance.choice(self._ports())
            try:
                if chance.random() < 0.1:
                    send_raw(port, chance)
                    self.found.requests[f"{name} raw"] += 1
                    continue
                method, path, body, headers = mutate(chance)
                status, reply = _request(port, method, path, body, headers, 30)
                self.found.requests[f"{name} {status // 100}xx"] += 1
                if status == 500:
                    self.found.server_errors.append(f"{name} {method} {path} {body[:200]!r}: {reply[:200]!r}")
            except (OSError, http.client.HTTPException, ValueError):
                self.found.requests[f"{name} no reply"] += 1  # killed, frozen, or a header that cannot be sent

    def _ports(self) -> list[tuple[str, int]]:
        ports = [("router", self.router.port), *(("server", server.port) for server in self.servers)]
        with suppress(OSError, AttributeError):
            match = re.search(r":(\d+)", self.address.read_text())
            ports += [("session server", int(match[1]))] if match else []
        for log in (self.run / "logs").glob("engine-*.log"):
            started = re.findall(r"^--- .* --port (\d+)", log.read_text(errors="replace"), re.MULTILINE)
            ports += [("engine", int(started[-1]))] if started else []
        return ports

    def compare(self) -> None:
        """Seeded requests through the router: a complete response is always the same."""
        chance = random.Random(self.seed + 1)
        bodies = [
            {
                "input_ids": [chance.randrange(4, 24) for _ in range(6)],
                "sampling_params": {"max_new_tokens": 8, "temperature": 0.8, "sampling_seed": n},
            }
            for n in range(16)
        ]
        expected: dict[int, list[int]] = {}
        while not self.is_over:
            n = chance.randrange(len(bodies))
            try:
                status, reply = _request(self.router.port, "POST", "/generate", json.dumps(bodies[n]).encode(), {}, 60)
            except (OSError, http.client.HTTPException):
                self.found.compared["no reply"] += 1
                continue
            if status != 200:
                self.found.compared[f"status {status}"] += 1
                self.found.compared_errors.add(f"{status} {reply[:160]!r}")
                continue
            tokens = json.loads(reply)["output_ids"]
            same = expected.setdefault(n, tokens) == tokens
            self.found.compared["equal" if same else "DIFFERENT"] += 1
            time.sleep(0.02)

    def measure(self) -> None:
        while not self.is_over:
            for server in (self.router,):
                with suppress(OSError):
                    self.found.usage.setdefault(server.name, []).append(read_usage(server.process.pid))
            time.sleep(5)

    def check_connections(self) -> None:
        """Descriptors of the router once its clients have gone: those it had before they came."""
        before = self.idle_descriptors
        deadline = time.monotonic() + QUIET_SECONDS
        while (now := read_usage(self.router.process.pid)[1]) > before + 8 and time.monotonic() < deadline:
            time.sleep(1)
        print(f"router: {before} descriptors before the clients, {now} after them")
        if now > before + 8:
            self.found.problems.append(f"router: descriptors grew from {before} to {now}")

    def check_engines(self) -> None:
        """Engines of the run that were lost and that came back; a life that ends meanwhile takes its engines along."""
        lines = (self.run / "logs" / "engines.log").read_text(errors="replace").splitlines()
        lost = sum("restarting it" in line for line in lines)
        back = sum(line.endswith(" is back.") for line in lines)
        print(f"engines of the run: {lost} lost, {back} restarted in the same life of the run")
        self.found.problems += [f"engines.log: {line}" for line in lines if "is given up" in line]
        if self.found.strikes["engine kill"] > 4 and not back:
            self.found.problems.append("no engine of the run came back")

    def check(self) -> None:
        found = self.found
        self.check_connections()
        for ended_by, code in found.lives:
            if code not in STATUSES[ended_by]:
                found.problems.append(f"a run ended by {ended_by} has exit status {code}")
        codes = {server.name: server.stop() for server in (self.router, *self.servers)}
        found.problems += [
            f"{name} has exit status {code} at SIGTERM" for name, code in codes.items() if code not in SERVER_STATUSES
        ]
        found.problems += [f"status 500: {line}" for line in found.server_errors[:10]]
        if found.compared["DIFFERENT"]:
            found.problems.append(f"{found.compared['DIFFERENT']} responses differ from the first one")
        found.problems += [f"a process is left: {pid}" for pid in self._marked()]
        for name, rows in found.usage.items():
            quarter = max(1, len(rows) // 4)
            for what, column in (("KiB resident", 0), ("descriptors", 1), ("threads", 2)):
                early = statistics.median(row[column] for row in rows[quarter : 2 * quarter] or rows)
                late = statistics.median(row[column] for row in rows[-quarter:])
                print(f"{name}: {what} {early:.0f} in the second quarter, {late:.0f} in the last")
                if late > 1.3 * early + 16:
                    found.problems.append(f"{name}: {what} grew from {early:.0f} to {late:.0f}")
        self.check_engines()
        try:
            print("run:", summarize_run(self.run))
        except (AssertionError, OSError, ValueError) as error:
            found.problems.append(f"the run's event log: {error}")
        said = (self.folder / "run.txt").read_text(errors="replace")
        if "Traceback" in said:
            found.problems.append("the run printed a traceback; see run.txt")


def read_usage(pid: int) -> tuple[int, int, int]:
    status = Path(f"/proc/{pid}/status").read_text()
    resident, threads = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads"))  # type: ignore[index]
    return resident, len(os.listdir(f"/proc/{pid}/fd")), threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder that the run and its output stay in")
    args = parser.parse_args()
    with ExitStack() as held:
        folder = (args.keep or Path(held.enter_context(tempfile.TemporaryDirectory()))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder, args.minutes, args.seed)
        if soak.is_small_disk:
            held.callback(subprocess.run, ["umount", "-l", str(soak.disk)], check=False)
        soak.start()
        soak.end = time.monotonic() + 60 * args.minutes
        jobs = [soak.live, soak.strike, soak.compare, soak.measure, *((lambda n=n: soak.fuzz(n)) for n in range(4))]
        threads = [threading.Thread(target=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        soak.check()
        found = soak.found
        print("requests:", dict(sorted(found.requests.items())))
        print("compared:", dict(found.compared), *sorted(found.compared_errors), sep="\n  ")
        print("strikes:", dict(found.strikes))
        print("exit statuses:", dict(Counter(found.lives)))
        print("problems:", len(found.problems), *found.problems, sep="\n  " if found.problems else " ")
        sys.exit(1 if found.problems else 0)


if __name__ == "__main__":
    main()
