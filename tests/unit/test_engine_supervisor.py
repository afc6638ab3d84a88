"""The supervisor of an engine, with small processes as engines: restarts, when it gives up, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.cluster.engine_supervisor import reserved_port
from megatron_rl.engines.serve import bind
from tests.processes import has_ended, wait_until

SUPERVISOR = """
import sys
from pathlib import Path
from megatron_rl.cluster.engine_process import Engine, RestartLimit
from megatron_rl.cluster.engine_supervisor import supervise
from megatron_rl.monitor.logs import setup_logging
setup_logging("supervisor", 0)
argv = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
endpoint = Path(sys.argv[2]) / "endpoint"
engines = [Engine("the engine", argv, endpoint, RestartLimit(2, 3600.0))]
if len(sys.argv) > 3:
    broken = [sys.executable, "-c", sys.argv[3], sys.argv[2]]
    engines.append(Engine("the other engine", broken, endpoint.with_name("never"), RestartLimit(2, 3600.0)))
sys.exit(supervise(engines, patience_s=0.5))
"""
SERVES = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
with open(folder / "pids", "a") as file: print(os.getpid(), file=file)
(folder / "endpoint").touch()
time.sleep(600)
"""
SEVERAL = """
import sys
from megatron_rl.cluster.engine_process import Engine, RestartLimit
from megatron_rl.cluster.engine_supervisor import supervise
from megatron_rl.cluster.fellows import Fellows
from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.monitor.logs import setup_logging
setup_logging("supervisor", 0)
run, scripts = RunDir(sys.argv[1]), sys.argv[2:]
run.endpoints.mkdir()
engines = []
for i, script in enumerate(scripts):
    argv = [sys.executable, "-c", script, str(run.endpoints), str(run.engine_endpoint(i))]
    limit, fellows = RestartLimit(2, 3600.0), Fellows(run, i, len(scripts))
    engines.append(Engine(f"engine-{i}", argv, run.engine_endpoint(i), limit, fellows=fellows))
sys.exit(supervise(engines, patience_s=0.5))
"""
SERVES_FOR_LONG = """
import os, sys, time
from pathlib import Path
with open(Path(sys.argv[1]) / "pids", "a") as file: print(os.getpid(), file=file)
Path(sys.argv[2]).touch()
time.sleep(600)
"""
FAILS = "import sys; sys.exit('no such model')"
WATCHED = """
import sys
from pathlib import Path
from megatron_rl.cluster.engine_process import Engine, Patience, RestartLimit
from megatron_rl.cluster.engine_supervisor import supervise
from megatron_rl.addresses import free_port
from megatron_rl.monitor.logs import setup_logging
setup_logging("supervisor", 0)
port = free_port()
argv = [sys.executable, "-c", sys.argv[1], sys.argv[2], str(port)]
patience = Patience(f"http://127.0.0.1:{port}", "the key", float(sys.argv[3]), float(sys.argv[4]))
endpoint = Path(sys.argv[2]) / "endpoint"
sys.exit(supervise([Engine("the engine", argv, endpoint, RestartLimit(int(sys.argv[5]), 3600.0), patience)], 0.5))
"""
ANSWERS = """
import http.server, json, os, subprocess, sys
from pathlib import Path
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked_well = self.path == "/server_info" and self.headers["Authorization"] == "Bearer the key"
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()
        with open(folder / ("asked" if asked_well else "asked-wrongly"), "a") as file: print(os.getpid(), file=file)
    def log_message(self, *_): pass
folder = Path(sys.argv[1])
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
child = subprocess.Popen(["sleep", "60"], start_new_session=True, stderr=subprocess.DEVNULL)
with open(folder / "children", "a") as file: print(child.pid, file=file)
(folder / "new").write_text(json.dumps({"url": "", "pid": os.getpid()}))
(folder / "new").rename(folder / "endpoint")
server.serve_forever()
"""
NEVER_SERVES = "import time; time.sleep(600)"
IGNORES_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SERVES
FAILS_BESIDE_IT = """
import sys, time
from pathlib import Path
while not (Path(sys.argv[1]) / "endpoint").exists(): time.sleep(0.02)
sys.exit("no such model")
"""


def pids(folder: Path, count: int, file: str = "pids") -> list[int]:
    """The process ids in a file, in order and each once, when there are `count` of them: of engines that started."""
    deadline = time.monotonic() + 60
    while True:
        lines = list(dict.fromkeys((folder / file).read_text().split())) if (folder / file).exists() else []
        if len(lines) >= count:
            return [int(line) for line in lines]
        assert time.monotonic() < deadline, f"only {len(lines)} of {count} in {file}"
        time.sleep(0.02)


def start(script: str, folder: Path, *other: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", SUPERVISOR, script, str(folder), *other]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def test_an_engine_that_dies_is_started_again_until_the_limit_is_reached(tmp_path: Path) -> None:
    supervisor = start(SERVES, tmp_path)
    for number in range(1, 4):
        os.kill(pids(tmp_path, number)[-1], signal.SIGKILL)
    _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1
    assert len(pids(tmp_path, 3)) == 3
    assert said.count("starting it again") == 2
    assert "restarted 2 times within 3600 s (cluster.max_engine_restarts)" in said


def test_an_engine_that_never_served_is_not_started_again(tmp_path: Path) -> None:
    supervisor = start(FAILS, tmp_path)
    _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1
    assert said.count("no such model") == 1
    assert "failed with exit code 1 before it served anything" in said


def test_an_engine_that_ignores_term_does_not_hide_the_end_of_another(tmp_path: Path) -> None:
    supervisor = start(IGNORES_TERM, tmp_path, FAILS_BESIDE_IT)
    _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1
    assert "the other engine failed with exit code 1" in said
    assert "the engine does not end; killing it" in said
    assert has_ended(pids(tmp_path, 1)[0])


def test_term_ends_the_engine_and_its_supervisor(tmp_path: Path) -> None:
    supervisor = start(SERVES, tmp_path)
    (engine,) = pids(tmp_path, 1)
    supervisor.terminate()
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0
    assert has_ended(engine)
    assert pids(tmp_path, 1) == [engine]


def test_an_engine_does_not_outlive_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    supervisor = start(SERVES, tmp_path)
    (engine,) = pids(tmp_path, 1)
    supervisor.kill()
    supervisor.communicate(timeout=60)
    wait_until(lambda: has_ended(engine))


def watch(script: str, folder: Path, *numbers: float) -> subprocess.Popen[str]:
    """A supervisor that asks its engine. `numbers`: patience at start, with silence, and restarts."""
    argv = [sys.executable, "-c", WATCHED, script, str(folder), *map(str, numbers)]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def test_an_engine_that_is_silent_is_killed_with_all_its_processes_and_started_again(tmp_path: Path) -> None:
    supervisor = watch(ANSWERS, tmp_path, 600, 0.5, 10**6)  # restarts without end: a busy machine may cause some
    silent = pids(tmp_path, 1, "asked")[-1]
    os.kill(silent, signal.SIGSTOP)
    children = pids(tmp_path, 1, "children")
    wait_until(lambda: has_ended(silent))
    wait_until(lambda: has_ended(children[-1]))
    while pids(tmp_path, 2, "asked")[-1] == silent:  # a successor was asked, and so it serves
        time.sleep(0.02)
    supervisor.terminate()
    _, said = supervisor.communicate(timeout=60)
    os.kill(pids(tmp_path, 2, "children")[-1], signal.SIGKILL)  # its parent obeyed TERM at once
    assert supervisor.returncode == 0
    assert "the engine was silent for 0.5 s (engine.silent_timeout_s); killing it" in said
    assert "the engine was silent for 0.5 s (engine.silent_timeout_s); starting it again" in said
    assert not (tmp_path / "asked-wrongly").exists()


def test_silence_counts_as_a_restart(tmp_path: Path) -> None:
    supervisor = watch(ANSWERS, tmp_path, 600, 0.5, 0)
    os.kill(pids(tmp_path, 1, "asked")[0], signal.SIGSTOP)
    _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1
    assert "was silent for 0.5 s (engine.silent_timeout_s); it has been restarted 0 times" in said


def test_an_engine_that_hangs_before_it_serves_is_not_waited_for_forever(tmp_path: Path) -> None:
    supervisor = watch(NEVER_SERVES, tmp_path, 0.2, 600, 5)
    _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1
    assert "did not serve within 0.2 s (engine.ready_timeout_s and silent_timeout_s) before it served" in said


def test_a_reserved_port_is_for_the_engine_alone() -> None:
    with reserved_port("127.0.0.1") as reservation:
        port = reservation.getsockname()[1]
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        for _ in range(2):  # the second time after the first has had a connection, as when an engine was killed
            with bind("127.0.0.1", port, reserved=True) as listener:
                listener.listen()
                with socket.create_connection(("127.0.0.1", port), timeout=5), listener.accept()[0] as accepted:
                    accepted.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def several(folder: Path, *scripts: str) -> subprocess.Popen[str]:
    """A supervisor of engines that know of each other; its output goes to a file."""
    with open(folder / "said", "w") as said:
        return subprocess.Popen([sys.executable, "-c", SEVERAL, str(folder), *scripts], stderr=said, text=True)


def test_a_run_of_several_engines_goes_on_without_one_that_never_comes_up_until_none_serves(tmp_path: Path) -> None:
    """It is tried again once another one serves, as often as the limit allows."""
    supervisor = several(tmp_path, FAILS, SERVES_FOR_LONG)
    deadline = time.monotonic() + 60
    while "that is enough; the run goes on with the others" not in (tmp_path / "said").read_text():
        assert time.monotonic() < deadline
        assert supervisor.poll() is None
        time.sleep(0.02)
    assert (tmp_path / "said").read_text().count("no such model") == 3
    assert (tmp_path / "endpoints" / "failed-0.json").exists()
    for number in range(1, 4):
        assert supervisor.poll() is None
        os.kill(pids(tmp_path / "endpoints", number)[-1], signal.SIGKILL)
    assert supervisor.wait(60) == 1


def test_engines_that_all_fail_before_they_serve_end_the_run_at_once(tmp_path: Path) -> None:
    supervisor = several(tmp_path, FAILS, FAILS)
    assert supervisor.wait(60) == 1
    assert (tmp_path / "said").read_text().count("no such model") == 2
