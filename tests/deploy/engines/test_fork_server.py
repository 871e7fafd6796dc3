"""Processes that are forked as Ray would have started them, with a stand-in for Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.engines import fork_server
from deploy.engines.actors import IMPORTS

pytestmark = pytest.mark.thorough

IMPORTED = "wave"
"""A module that nothing else here imports."""
SCRIPT = f"""
import json, os, sys, time
told = dict(argv=sys.argv, pid=os.getpid(), parent=os.getppid(), group=os.getpgid(0), session=os.getsid(0),
            directory=os.getcwd(), has_imported="{IMPORTED}" in sys.modules, told=os.environ.get("TOLD"),
            beside=sys.path[0], name=__name__)
print(json.dumps(told), flush=True)
sys.stdin.read()
"""
TIMEOUT_S = 60.0


class Node:
    """Starts processes as a raylet does; it is their parent, and the raylet whose end ends the server."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._script = directory / "worker.py"
        self._script.write_text(SCRIPT)
        self._started: list[subprocess.Popen[str]] = []
        self.path = directory / "raylet"

    def start(self, *options: str, modules: tuple[str, ...] = (IMPORTED,), **environment: str) -> Any:
        """A process's report on itself; it lives until `end`."""
        command = [*fork_server.command(modules).split(), *options, str(self._script), f"--raylet-name={self.path}"]
        started = subprocess.Popen(
            command,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **environment}, cwd=self._directory,
        )  # fmt: skip
        self._started.append(started)
        return json.loads(started.stdout.readline())

    def end(self) -> list[int]:
        """End all that were started; returns with what."""
        for each in self._started:
            each.stdin.close()
            each.stdout.close()
        return [each.wait(TIMEOUT_S) for each in self._started]

    @property
    def servers(self) -> set[int]:
        """Processes that serve this node; a fork has its server's title, as long as it gives itself no other."""
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        parents = {pid: parent(pid) for pid in pids if f"{self.path}.fork" in title(pid)}
        return {pid for pid, its_parent in parents.items() if its_parent not in parents}


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has just ended
        return ""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def logged(directory: Path) -> str:
    """The fork server's message, as it is if it cannot fork."""
    return "".join(log.read_text() for log in directory.glob("raylet.fork*.log"))


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path)
    yield node
    node.end()
    for pid in node.servers:
        os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_fork_is_like_the_process_that_was_asked_for_but_has_imported(node, tmp_path):
    first, second = node.start("-u", TOLD="first"), node.start(TOLD="second")
    for told, name in ((first, "first"), (second, "second")):
        assert told["has_imported"]
        assert told["told"] == name
        assert told["argv"] == [str(tmp_path / "worker.py"), f"--raylet-name={node.path}"]
        assert (told["directory"], told["beside"], told["name"]) == (str(tmp_path), str(tmp_path), "__main__")
    assert {first["parent"], second["parent"]} == node.servers
    assert node.end() == [0, 0]


def test_what_engines_import_starts_no_thread_however_many_they_compute_with(node, tmp_path):
    """Or there would be no forks, and nothing but a slow start would tell."""
    threads = {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    told = node.start(modules=IMPORTS, **threads)
    while told["parent"] == os.getpid() and not logged(tmp_path):  # a machine too busy to import all of it in time
        told = node.start(modules=IMPORTS, **threads)
    assert {told["parent"]} == node.servers


def test_a_fork_shares_the_processors_with_who_asked_for_it(node):
    """Linux shares them by sessions (autogroup): on a busy machine an engine in one of its own waits for longer."""
    assert node.start()["session"] == os.getsid(0)


def test_the_servers_group_is_its_own(node):
    """Ray kills the process group of a worker that has died, and the terminal interrupts that in the foreground."""
    told = node.start()
    assert os.getpgid(told["parent"]) == told["parent"] != os.getpgid(0)


def test_ray_ends_a_fork_alone_by_its_process_group(node):
    first, second = node.start(), node.start()
    assert {first["group"], second["group"]} == {first["pid"], second["pid"]}
    os.killpg(first["pid"], signal.SIGKILL)
    until(lambda: title(first["pid"]) == "")  # not even a zombie is left
    assert node.start()["parent"] == second["parent"]


def test_who_started_it_ends_with_the_fork(node):
    told = node.start()
    os.kill(told["pid"], signal.SIGKILL)
    assert node._started[0].wait(TIMEOUT_S) == 0


def test_a_server_that_has_died_is_replaced(node):
    before = node.start()
    os.kill(before["parent"], signal.SIGKILL)
    until(lambda: title(before["parent"]) == "")
    after = node.start()
    assert after["has_imported"]
    assert after["parent"] != before["parent"]


def test_processes_that_import_from_elsewhere_or_have_other_threads_have_another_server(node, tmp_path):
    kinds = ({}, {"PYTHONPATH": str(tmp_path)}, {"OMP_NUM_THREADS": "7"})
    assert len({node.start(**kind)["parent"] for kind in kinds}) == 3
    assert node.start(modules=(IMPORTED, "colorsys"))["has_imported"]
    assert len(node.servers) == 4


@pytest.mark.parametrize("options", [("-X", "utf8"), ("-O",)])
def test_what_a_fork_could_not_do_is_done_by_a_process_of_its_own(node, options):
    told = node.start(*options)
    assert not told["has_imported"]
    assert not node.servers


def test_nothing_is_forked_from_a_process_with_threads(node, tmp_path):
    """A fork has one thread; a lock that another one of its parent had is never released in it."""
    threaded = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "threaded.py").write_text(threaded)
    told = node.start(modules=("threaded",), PYTHONPATH=str(tmp_path))
    assert told["parent"] == os.getpid()
    assert "has 2 threads" in logged(tmp_path)


def test_without_a_server_a_process_starts_as_it_would_have(node, tmp_path):
    node.path = tmp_path / ("long" * 30)
    assert not node.start()["has_imported"]


def test_a_server_ends_with_its_raylet_and_its_forks_do_not(tmp_path):
    node = Node(tmp_path)
    command = [*fork_server.command((IMPORTED,)).split(), str(tmp_path / "worker.py"), f"--raylet-name={node.path}"]
    script = f"import subprocess; subprocess.run({command!r})"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as raylet:
        told = json.loads(raylet.stdout.readline())
        raylet.kill()
        until(lambda: title(told["parent"]) == "")
        assert title(told["pid"])
    until(lambda: title(told["pid"]) == "")  # now that nothing comes to its standard input any more


def test_a_server_without_forks_ends_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(fork_server, "IDLE_S", 0.1)
    server = fork_server.ForkServer(str(tmp_path / "socket"), os.getpid())
    assert server.run() is None
    server._listener.close()
    os.close(server._raylet)


@pytest.mark.slow
@pytest.mark.ci
def test_engines_import_hardly_anything_that_is_not_there_already():
    """Or their start would take as long as it did; and nothing that is there may have started a thread."""
    script = (
        "import os, sys\n"
        "from deploy.engines.actors import IMPORTS\n"
        "from deploy.engines.fork_server import load\n"
        "for name in IMPORTS: load(name)\n"
        "before, num_threads = set(sys.modules), len(os.listdir('/proc/self/task'))\n"
        "import workers.engine.target, workers.engine.draft, workers.parallel.leader\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - {'core', 'deploy', 'workers'}\n"
        "print(len([name for name in set(sys.modules) - before if name.split('.')[0] in new]), num_threads)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300).stdout
    num_new, num_threads = map(int, out.split())
    assert num_new < 20
    assert num_threads == 1
