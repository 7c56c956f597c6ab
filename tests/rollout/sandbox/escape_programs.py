"""Programs that try to get out of the sandbox, and the world outside that would notice.

Each prints ESCAPED and what it managed, and otherwise holds its tongue. It finds what to aim at in ``world.json``.
Only the standard library is used, so that any interpreter can run them, as any user.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from miles.rollout.sandbox.protocol import IsolationPlan, SandboxLimits
from miles.rollout.sandbox.run import Sandbox

SECRET = "the combination is 1-2-3-4-5"
VARIABLE = "MILES_TEST_SECRET"
LIMITS = SandboxLimits(wall=30.0, cpu=20.0)

_BEGIN = """
import ctypes, errno, fcntl, json, os, resource, signal, socket, struct, sys
world = json.load(open("world.json"))
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": 0, "aarch64": 1}[os.uname().machine]

def escaped(what):
    print("ESCAPED", what, flush=True)

def attempt(what, act, *args, **named):
    try:
        result = act(*args, **named)
    except (OSError, ValueError, AttributeError) as error:
        return None
    escaped(f"{what}: {result!r}"[:300])

def syscall(what, x86, arm, *args):
    number = (x86, arm)[numbers]
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if result >= 0:
        escaped(f"{what}: {result}")
"""

ATTEMPTS = {
    "connects to a server on this machine": """
attempt("tcp", socket.create_connection, ("127.0.0.1", world["port"]), timeout=2)
attempt("tcp6", socket.create_connection, ("::1", world["port"]), timeout=2)
def knock():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    return s.sendto(b"hello", ("127.0.0.1", world["port"]))
attempt("udp", knock)
""",
    "listens for the network": """
def listen():
    s = socket.socket()
    s.bind(("0.0.0.0", 0))
    s.listen()
attempt("listen", listen)
""",
    "asks for a name": """
attempt("dns", socket.getaddrinfo, "example.com", 80)
attempt("dns", socket.gethostbyname, "localhost.localdomain")
""",
    "opens sockets of every kind": """
for family in range(46):
    for kind in (1, 2, 3, 5):
        attempt(f"socket {family} {kind}", socket.socket, family, kind)
        if family != socket.AF_UNIX:
            attempt(f"socketpair {family} {kind}", socket.socketpair, family, kind)
""",
    "talks to local sockets": """
for address in (world["unix"], world["abstract"]):
    def knock():
        s = socket.socket(socket.AF_UNIX)
        s.connect(address)
    attempt(f"unix {address!r}", knock)
    def send():
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        return one.sendmsg([b"hello"], [], 0, address)
    attempt(f"datagram {address!r}", send)
    one, other = socket.socketpair()
    attempt("sendto", one.sendto, b"hello", address)
    attempt("reconnect", one.connect, address)
    attempt("bind", one.bind, "name")
""",
    "reads the home folder and a secret": """
def at_home():  # what leads to the interpreter is shown, empty but for it
    leads = (sys.executable + "/", os.path.dirname(os.__file__) + "/")
    there = [f"{world['home']}/{name}/" for name in os.listdir(world["home"])]
    if not (foreign := [path for path in there if not any(lead.startswith(path) for lead in leads)]):
        raise OSError
    return foreign
attempt("home", at_home)
attempt("folder", os.listdir, world["folder"])
attempt("secret", lambda: open(world["secret"]).read())
for link in ("/etc/passwd", "/etc/shadow", world["run"] + "/pyproject.toml"):
    attempt(link, lambda: open(link).read())
attempt("up", lambda: open("../" * 20 + world["secret"]).read())
""",
    "reads other processes": """
own = {(pid, file) for pid in ("self", "thread-self") for file in ("cwd", "exe")}
for pid in ("self", "thread-self", "1", str(os.getppid()), str(world["parent"]), str(world["victim"])):
    for file in ("environ", "mem", "maps", "cmdline", "status", "fd", "root", "cwd", "exe"):
        if (pid, file) not in own:
            attempt(f"/proc/{pid}/{file}", os.open, f"/proc/{pid}/{file}", os.O_RDONLY)
attempt("/proc", os.listdir, "/proc/self")
attempt("/sys", os.listdir, "/sys/kernel")
""",
    "finds secrets in its own environment": """
if world["variable"] in os.environ or any(world["secret_text"] in value for value in os.environ.values()):
    escaped(dict(os.environ))
""",
    "writes outside its folder": """
for place in (world["folder"], world["home"], "/", "/usr/lib", "/usr/bin", "/etc", "/dev", "/var/tmp", "/run", "/proc",
              os.path.dirname(os.__file__), os.path.dirname(sys.executable), ".."):
    attempt(f"create in {place}", os.open, place + "/miles-escape", os.O_CREAT | os.O_WRONLY)
    attempt(f"mkdir in {place}", os.mkdir, place + "/miles-escape-folder")
    attempt(f"symlink in {place}", os.symlink, "x", place + "/miles-escape-link")
attempt("append", open, world["secret"], "a")
attempt("library", open, os.__file__, "r+")
attempt("interpreter", open, sys.executable, "r+")
""",
    "damages a file without opening it to write": """
path = world["secret"]
attempt("truncate by opening", os.open, path, os.O_RDONLY | os.O_TRUNC)
attempt("odd mode", os.open, path, 3 | os.O_TRUNC)
attempt("truncate", os.truncate, path, 0)
attempt("setxattr", os.setxattr, path, "user.x", b"x")
for path in (world["secret"], os.__file__, sys.executable):
    attempt("chmod", os.chmod, path, 0o755)
    attempt("chown", os.chown, path, os.getuid(), os.getgid())
    attempt("utime", os.utime, path)
attempt("rename", os.rename, world["secret"], "mine")
attempt("unlink", os.unlink, world["secret"])
""",
    "links its way out": """
os.symlink(world["secret"], "soft")
attempt("soft link", lambda: open("soft").read())
attempt("soft link to write", open, "soft", "w")
attempt("hard link", os.link, world["secret"], "hard")
attempt("hard link of a library", os.link, os.__file__, "hard")
os.symlink(world["folder"], "door")
attempt("through a linked folder", os.listdir, "door")
attempt("rename out", os.rename, "soft", world["folder"] + "/soft")
folder = os.open(".", os.O_RDONLY)
attempt("openat", os.open, "../" * 30 + world["secret"].lstrip("/"), os.O_RDONLY, dir_fd=folder)
""",
    "finds open files": """
for number in range(3, 4096):
    attempt(f"file {number}", os.fstat, number)
""",
    "signals processes outside": """
for pid in (os.getppid() if os.getppid() > 1 else 0, world["parent"], world["victim"]):
    for number in (0, signal.SIGCONT) if pid != world["victim"] else (0, signal.SIGSTOP, signal.SIGKILL):
        if pid:
            attempt(f"kill {pid}", os.kill, pid, number)
            syscall(f"tkill {pid}", 200, 130, pid, int(number))
            syscall(f"tgkill {pid}", 234, 131, pid, pid, int(number))
    if pid:
        attempt(f"killpg {pid}", os.killpg, pid, 0)
        attempt(f"pidfd {pid}", os.pidfd_open, pid)
one, other = os.pipe()
F_SETOWN, F_SETSIG = 8, 10
attempt("owner of signals", fcntl.fcntl, one, F_SETOWN, world["victim"])
attempt("which signal", fcntl.fcntl, one, F_SETSIG, signal.SIGKILL)
""",
    "traces processes outside": """
for pid in (world["victim"], os.getppid(), 1):
    syscall("ptrace attach", 101, 117, 16, pid, 0, 0)
    syscall("ptrace seize", 101, 117, 0x4206, pid, 0, 0)
    buffer = ctypes.create_string_buffer(16)
    vector = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(buffer), 16))
    syscall("process_vm_readv", 310, 270, pid, vector, 1, vector, 1, 0)
    syscall("process_vm_writev", 311, 271, pid, vector, 1, vector, 1, 0)
syscall("ptrace me", 101, 117, 0, 0, 0, 0)
""",
    "raises its limits": """
for what in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    attempt(f"raise {what}", resource.setrlimit, what, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    attempt(f"prlimit {what}", resource.prlimit, 0, what, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
attempt("another's limits", resource.prlimit, world["victim"], resource.RLIMIT_CPU)
attempt("nice", os.setpriority, os.PRIO_PROCESS, 0, -5)
attempt("nice to another", os.setpriority, os.PRIO_PROCESS, world["victim"], 19)
attempt("affinity of another", os.sched_setaffinity, world["victim"], {0})
""",
    "changes its world": """
attempt("chroot", os.chroot, ".")
syscall("mount", 165, 40, b"none", b".", b"tmpfs", 0, None)
syscall("bind", 165, 40, b"/", b".", None, 4096, None)
syscall("umount", 166, 39, b"/usr/lib", 2)
syscall("remount", 165, 40, None, b"/", None, 32, None)
syscall("pivot_root", 155, 41, b".", b".")
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
    syscall(f"unshare {flag:x}", 272, 97, flag)
    syscall(f"clone {flag:x}", 56, 220, flag | 17, 0, 0, 0, 0)
syscall("clone3", 435, 435, ctypes.create_string_buffer(88), 88)
syscall("open_tree", 428, 428, -100, b"/", 1)
syscall("fsopen", 430, 430, b"tmpfs", 0)
syscall("personality", 135, 92, 0x0040000)
""",
    "becomes someone else": """
for identity in (0, 1, 65534, world["uid"]):
    if identity != os.getuid():
        attempt(f"setuid {identity}", os.setuid, identity)
        attempt(f"setresuid {identity}", os.setresuid, identity, identity, identity)
        attempt(f"setgid {identity}", os.setgid, identity)
attempt("setgroups", os.setgroups, [0])
header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
data = ctypes.create_string_buffer(b"\\xff" * 24)
syscall("capset", 126, 91, header, data)
""",
    "goes to devices": """
for device in ("mem", "kmem", "kmsg", "port", "tty", "console", "sda", "vda", "nvme0n1", "fuse", "kvm", "net/tun",
               "nvidia0", "nvidiactl", "dri/card0", "loop-control", "ptmx", "pts/0", "input/event0", "vsock"):
    attempt(device, os.open, "/dev/" + device, os.O_RDONLY)
attempt("mknod", os.mknod, "device", 0o20666, os.makedev(1, 1))
attempt("mkfifo outside", os.mkfifo, world["folder"] + "/fifo")
attempt("terminal", fcntl.ioctl, 0, 0x5412, b"x")
""",
    "asks the kernel for other ways": """
buffer = ctypes.create_string_buffer(4096)
syscall("io_uring_setup", 425, 425, 8, buffer)
syscall("bpf", 321, 280, 0, buffer, 64)
syscall("perf_event_open", 298, 241, buffer, 0, -1, -1, 0)
syscall("userfaultfd", 323, 282, 1)
syscall("memfd_create", 319, 279, b"x", 0)
syscall("add_key", 248, 217, b"user", b"x", b"y", 1, -3)
syscall("keyctl", 250, 219, 0, -3, 1)
syscall("open_by_handle_at", 304, 265, -100, buffer, 0)
syscall("name_to_handle_at", 303, 264, -100, b".", buffer, buffer, 0)
syscall("openat2", 437, 437, -100, b".", buffer, 24)
syscall("inotify_init1", 294, 26, 0)
syscall("fanotify_init", 300, 262, 0, 0)
syscall("shmget", 29, 194, 0, 4096, 0o1600)
syscall("msgget", 68, 186, 0, 0o1600)
syscall("mq_open", 240, 180, b"x", 0o100, 0o600, None)
syscall("seccomp", 317, 277, 1, 0, buffer)
syscall("pidfd_getfd", 438, 438, 0, 0, 0)
syscall("setns", 308, 268, 0, 0)
syscall("kexec_load", 246, 104, 0, 0, None, 0)
syscall("init_module", 175, 105, buffer, 0, b"")
syscall("reboot", 169, 142, 0xfee1dead, 672274793, 0)
syscall("syslog", 103, 116, 2, buffer, 4096)
syscall("quotactl", 179, 60, 0, None, 0, buffer)
syscall("process_madvise", 440, 440, 0, buffer, 1, 4, 0)
syscall("landlock", 444, 444, None, 0, 1)
syscall("prctl subreaper", 157, 167, 36, 1, 0, 0, 0)
syscall("prctl dumpable", 157, 167, 4, 1, 0, 0, 0)
syscall("next kernel's", 1000, 1000)
syscall("x32", 0x40000000 | 41, 1001, 2, 1, 0)
""",
}


# makes every syscall that is on no list, the x32 ones and those after the last included, and prints what each gave
SWEEP = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
skipped = set(SKIPPED)
found = {}
for number in [*range(1024), *(0x40000000 + n for n in range(1024)), 0x7fffffff, -1]:
    if number not in skipped:
        ctypes.set_errno(0)
        result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
        found[number] = ctypes.get_errno() if result == -1 else 0
os.write(1, json.dumps(found).encode())
"""

# a call through the 32-bit gate of x86-64, which has its own numbers: getpid is 20 there, and 39 here
COMPAT = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20; int 0x80; ret
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
print("before", flush=True)
print("after", call(), flush=True)
"""

# asks for a segment of its own (modify_ldt is 154 on x86-64), which would lead to 32-bit code
SEGMENT = """
import ctypes, errno, struct
libc = ctypes.CDLL(None, use_errno=True)
entry = ctypes.create_string_buffer(struct.pack("<IIII", 0, 0, 0xfffff, 0b1010001))
for function in (0, 1, 2, 0x11):
    result = libc.syscall(154, function, entry, 16)
    print(result, errno.errorcode[ctypes.get_errno()])
"""

# spends CPU time in children that outlive their parents, each for less than a monitoring period
ORPHANS = """
import os, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
while True:
    ended, alive = os.pipe()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os.setsid()
            burn(0.005)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(alive)
    os.read(ended, 1)  # one at a time: until the orphan has ended
    os.close(ended)
"""


# sends every signal to the first process of its namespace, which is its supervisor, and to all it may signal
SIGNALS = """
import os, signal
for number in range(1, 65):
    for pid in (1, -1) if number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1) else (1,):
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            pass
        try:
            os.kill(pid, number)
        except OSError:
            pass
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
print(os.spawnv(os.P_WAIT, "/bin/sh", ["sh", "-c", "exit 7"]))
"""


FORKING = {  # programs of several processes, and the limit each runs into; None: it ends by itself
    "processes": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "cpu": "import os\nfor _ in range(3): os.fork()\nwhile True: pass",
    "memory": """
import os, time
for _ in range(4):
    if os.fork() == 0:
        x = bytearray(os.urandom(1 << 20) * 48)
        time.sleep(1000)
time.sleep(1000)
""",
    None: """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(1000)", "MARKER"])
    os._exit(0)
os.wait()
""",
}


def running_with(marker: str) -> list[str]:
    """Processes of this machine that have a word in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                found += [entry.name] if marker.encode() in (entry / "cmdline").read_bytes() else []
        except OSError:
            continue
    return found


async def all_forked(plan: IsolationPlan) -> list[str]:
    """What is wrong with how programs of several processes ended."""
    marker = f"marker-{os.urandom(8).hex()}"
    sandbox, wrong = Sandbox(plan), []
    for killed_by, program in FORKING.items():
        limits = SandboxLimits(wall=60.0, cpu=1.0, memory=128 << 20)
        outcome = await sandbox.run(program.replace("MARKER", marker), limits=limits)
        if outcome.killed_by != killed_by or (killed_by is None and not outcome.is_success):
            wrong.append(f"{killed_by} expected: {outcome}")
    return wrong + [f"left running: {pid}" for pid in running_with(marker)]


class World:
    """Things to aim at, as the user who runs the tests has them: files, servers, a process, a secret variable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.secret = folder / "secret.txt"
        self.secret.write_text(SECRET)
        self._before = self.secret.stat()
        self._servers = [socket.create_server(("127.0.0.1", 0)), *(socket.socket(socket.AF_UNIX) for _ in range(2))]
        paths = (str(folder / "s"), f"\0miles-{os.getpid()}-{os.urandom(4).hex()}")
        for server, path in zip(self._servers[1:], paths, strict=True):
            server.bind(path)
            server.listen()
        self._victim = subprocess.Popen(["sleep", "600"])
        self._leak = os.open(self.secret, os.O_RDONLY)
        os.set_inheritable(self._leak, True)
        os.environ[VARIABLE] = SECRET
        aims = {
            "port": self._servers[0].getsockname()[1],
            "unix": paths[0],
            "abstract": paths[1],
            "home": str(Path.home()),
            "folder": str(folder),
            "secret": str(self.secret),
            "secret_text": SECRET,
            "variable": VARIABLE,
            "run": str(Path(__file__).parents[3]),
            "parent": os.getpid(),
            "victim": self._victim.pid,
            "uid": os.getuid(),
        }
        self.files = {"world.json": json.dumps(aims).encode()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.environ.pop(VARIABLE, None)
        os.close(self._leak)
        self._victim.kill()
        self._victim.wait()
        for server in self._servers:
            server.close()

    def damage(self) -> list[str]:
        """What happened to it."""
        found = []
        for server in self._servers:
            server.setblocking(False)
            try:
                server.accept()
                found.append(f"someone called {server.getsockname()!r}")
            except BlockingIOError:
                pass
        if self._victim.poll() is not None:
            found.append("the process next door is dead")
        now = self.secret.stat()
        watched = ("st_mode", "st_uid", "st_mtime_ns", "st_nlink", "st_size")
        if any(getattr(now, name) != getattr(self._before, name) for name in watched):
            found.append("the secret was touched")
        if left := {path.name for path in self._folder.iterdir()} - {"secret.txt", "s"}:
            found.append(f"left behind: {left}")
        return found


async def tried(sandbox: Sandbox, name: str, world: World) -> str | None:
    """What an attempt managed, or that it did not get to the end of trying; None when it got nowhere."""
    outcome = await sandbox.run(_BEGIN + ATTEMPTS[name] + 'print("DONE")', limits=LIMITS, files=world.files)
    if b"ESCAPED" in outcome.stdout or SECRET.encode() in outcome.stdout:
        return f"{name}: {outcome.stdout.decode(errors='replace')}"
    return None if outcome.stdout == b"DONE\n" else f"{name}: {outcome}"


async def all_tried(plan: IsolationPlan, folder: Path) -> list[str]:
    """What any of the attempts managed."""
    with World(folder) as world:
        sandbox = Sandbox(plan, concurrency=4)
        found = await asyncio.gather(*(tried(sandbox, name, world) for name in ATTEMPTS))
        return [*(text for text in found if text), *world.damage()]


if __name__ == "__main__" and sys.argv[1] == "run":  # as another user: how one program ends behind given walls
    name, wanted = sys.argv[2], json.loads(sys.argv[3])
    program = globals()[name].replace("SKIPPED", sys.argv[4] if len(sys.argv) > 4 else "")
    ended = asyncio.run(Sandbox(IsolationPlan(*wanted)).run(program, limits=LIMITS))
    sys.stdout.write(json.dumps([ended.exit, ended.signal, ended.killed_by, ended.stdout.decode()]))
elif __name__ == "__main__":  # as another user: which walls it would choose, and what the attempts manage behind them
    from miles.rollout.sandbox import isolation

    abi = int(sys.argv[1])
    chosen = isolation.plan_isolation(unsandboxed=False) if abi < 0 else IsolationPlan(landlock=abi, seccomp=True)
    with tempfile.TemporaryDirectory() as top:
        found = asyncio.run(all_tried(chosen, Path(top) / "world")) + asyncio.run(all_forked(chosen))
        sys.stdout.write(json.dumps({"plan": chosen, "found": found}))
