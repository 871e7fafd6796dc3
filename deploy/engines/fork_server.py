"""Starts Python processes as forks of a process with the slow imports already done, which saves seconds for each.

Ray starts a worker process by a command, which a runtime environment can replace (`py_executable`). Here the command is
this file. It passes Ray's command to the fork server of its node. The server forks a process that continues as if Ray
had started it. The first process on a node starts the server. After any failure the process starts without the server.

Knows processes, sockets, and the one argument of Ray's worker processes that names their raylet; must not know the
program. It runs as a script, so it imports the standard library alone.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import shlex
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path

TIMEOUT_S = 40.0
"""Seconds to wait for a server that is still importing; Ray gives up on a worker process after 60 s."""
IDLE_S = 600.0
"""Seconds without running forks after which a server ends, to free its memory."""
ORDER_TIMEOUT_S = 5.0
"""Seconds for a connected process to send its request. The server handles no other process meanwhile."""
RETRY_S = 0.02
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's OpenBLAS starts threads at import, and a process with threads cannot fork. Engines compute with torch."""
RAYLET = "--raylet-name="
"""Argument of a worker process with its raylet's socket. There is one raylet for each node."""
FORKED = b"+"
_LENGTH = struct.Struct("I")


@dataclass(frozen=True)
class ForkRequest:
    """The program of a new process, and its environment."""

    script: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str

    @classmethod
    def of(cls, arguments: Sequence[str]) -> ForkRequest:
        """Build a request from Python's arguments. Raises: ValueError for options of Python itself."""
        script, *rest = arguments[1:] if arguments[0] == "-u" else arguments
        if script.startswith("-"):
            raise ValueError(f"a fork cannot apply Python's option {script}")
        return cls(script, rest, dict(os.environ), os.getcwd())  # noqa: PTH109  plain strings suffice


def command(modules: Sequence[str]) -> str:
    """A `py_executable` whose processes have `modules` imported. These must not start threads or change on disk.

    An entry "module:function" also calls the function, once.
    """
    return shlex.join([sys.executable, "-IS", __file__, "launch", ",".join(modules)])


# In the process that Ray has started


def launch(modules: str, arguments: Sequence[str]) -> None:
    """Run Python with `arguments` in a fork and return when it has ended; without a server, run it in this process."""
    try:
        request = ForkRequest.of(arguments)
        with socket.socket(socket.AF_UNIX) as server:
            _connect(server, modules, arguments)
            _send(server, request)
            if server.recv(1) == FORKED:
                server.settimeout(None)
                server.recv(1)  # the fork holds the other end as long as it lives
                return
    except (OSError, ValueError) as error:
        print(f"this process is no fork: {error}", file=sys.stderr)  # noqa: T201  Ray keeps it with the worker's output
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606


def _connect(server: socket.socket, modules: str, arguments: Sequence[str]) -> None:
    """Connect to the server for these modules; start it if there is none. Raises: OSError."""
    path = _socket_path(modules, arguments)
    server.settimeout(TIMEOUT_S)
    if not _is_connected(server, path):
        with open(f"{path}.log", "ab") as log:  # noqa: PTH123  as above
            arguments = [sys.executable, "-u", __file__, "serve", modules, path, str(os.getppid())]
            subprocess.Popen(  # noqa: S603
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **ONE_THREAD},
                process_group=0,  # not a new session: Linux would schedule it as one group
            )
        end_s = time.monotonic() + TIMEOUT_S
        while not _is_connected(server, path):
            if time.monotonic() > end_s:
                raise TimeoutError(f"no fork server listens at {path}; see {path}.log")
            time.sleep(RETRY_S)
    if _owner(server) != os.getuid():
        raise PermissionError(f"{path} belongs to another user")


def _socket_path(modules: str, arguments: Sequence[str]) -> str:
    """Address of this node's server for processes with the same imports, paths and number of threads."""
    raylet = next(each.removeprefix(RAYLET) for each in arguments if each.startswith(RAYLET))
    kind = [sys.executable, modules, os.environ.get("PYTHONPATH"), os.environ.get("OMP_NUM_THREADS")]
    return f"{raylet}.fork-{hashlib.sha256(repr(kind).encode()).hexdigest()[:8]}"


def _is_connected(server: socket.socket, path: str) -> bool:
    try:
        server.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    return True


def _owner(server: socket.socket) -> int:
    """User id of the listening process."""
    _, uid, _ = struct.unpack("3i", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def _send(server: socket.socket, request: ForkRequest) -> None:
    message = json.dumps(asdict(request)).encode()
    socket.send_fds(server, [_LENGTH.pack(len(message))], [0, 1, 2])
    server.sendall(message)


# In the server


class ForkServer:
    """Forks a process for each request, until its raylet has ended or it has been idle for `IDLE_S`."""

    def __init__(self, path: str, raylet_pid: int) -> None:
        self._raylet = os.pidfd_open(raylet_pid)
        self._listener = socket.socket(socket.AF_UNIX)
        Path(path).unlink(missing_ok=True)
        before = os.umask(0o177)  # anyone who can connect can run any code
        self._listener.bind(path)
        os.umask(before)
        self._listener.listen()
        self._forks: dict[int, int] = {}
        """Process ids, by a descriptor that becomes readable when the process ends."""

    def run(self) -> ForkRequest | None:
        """Serve requests. Returns the request in each fork; None in the server, at its end."""
        while True:
            timeout_s = None if self._forks else IDLE_S
            watched = [self._listener.fileno(), self._raylet, *self._forks]
            ready, _, _ = select.select(watched, [], [], timeout_s)
            if not ready or self._raylet in ready:
                return None
            for descriptor in self._forks.keys() & set(ready):
                self._bury(descriptor)
            if self._listener.fileno() in ready and (request := self._serve()) is not None:
                return request

    def _bury(self, descriptor: int) -> None:
        os.close(descriptor)
        pid, status = os.waitpid(self._forks.pop(descriptor), 0)
        print(f"process {pid} has ended with {os.waitstatus_to_exitcode(status)}")  # noqa: T201  its output is its log

    def _serve(self) -> ForkRequest | None:
        """Fork for one connected process. Returns the request in the fork; None in the server."""
        connection, _ = self._listener.accept()
        connection.settimeout(ORDER_TIMEOUT_S)
        request: ForkRequest | None = None
        streams: list[int] = []
        pid = None
        try:
            _check_threads()
            request, streams = _receive(connection)
            connection.send(FORKED)
            pid = os.fork()
        except (OSError, ValueError) as error:
            print(f"could not fork: {error!r}")  # noqa: T201  its output is its log
        if pid == 0:
            self._become_fork(streams)
            connection.detach()  # stays open: the other end sees it close when this process ends
            return request
        if pid is not None:
            self._forks[os.pidfd_open(pid)] = pid
        for descriptor in streams:
            os.close(descriptor)
        connection.close()
        return None

    def _become_fork(self, streams: Sequence[int]) -> None:
        """Leave the server's process group, take over the caller's streams, and close the server's descriptors."""
        os.setpgid(0, 0)  # Ray kills the process group of a worker that has died
        self._listener.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for descriptor in (self._raylet, *self._forks, *streams):
            os.close(descriptor)


def _check_threads() -> None:
    """Raises: OSError unless this is the only thread. A lock held by another thread would stay locked in the fork."""
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208  as above
        raise OSError(f"this process has {num_threads} threads")


def _receive(connection: socket.socket) -> tuple[ForkRequest, list[int]]:
    """A request, and the descriptors of its standard streams. Raises: OSError, ValueError."""
    head, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
    if len(head) < _LENGTH.size or len(streams) != 3:
        raise ValueError("the request is incomplete")
    with connection.makefile("rb") as rest:
        return ForkRequest(**json.loads(rest.read(_LENGTH.unpack(head)[0]))), streams


def load(module: str) -> None:
    """Import a module, and call the function that is named with it, if any."""
    name, _, function = module.partition(":")
    imported = importlib.import_module(name)
    if function:
        attrgetter(function)(imported)()


def serve(modules: str, path: str, raylet_pid: int) -> None:
    """Import `modules` and serve until the end; each fork runs its request instead."""
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another server is starting
    server = ForkServer(path, raylet_pid)
    for module in modules.split(","):
        load(module)
    gc.collect()
    gc.freeze()  # a garbage collection would make each fork copy the server's objects
    request = server.run()
    os.close(lock)  # in a fork it would prevent others from serving
    if request is not None:
        _execute(request)


def _execute(request: ForkRequest) -> None:
    """Run the script as Python would."""
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    sys.argv[:] = [request.script, *request.arguments]
    sys.path[0] = os.path.dirname(request.script)  # noqa: PTH120  as above
    runpy.run_path(request.script, run_name="__main__")


if __name__ == "__main__":
    _, action, names, *others = sys.argv
    if action == "launch":
        launch(names, others)
    else:
        serve(names, others[0], int(others[1]))
