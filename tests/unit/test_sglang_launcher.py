"""The launcher of SGLang without SGLang: its words, what it refuses, and that no process of the server is left."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_rl.cluster.engine_supervisor import reserved_port
from megatron_rl.config import ConfigError
from megatron_rl.config.engine import KEY_FILE, EngineConfig
from megatron_rl.engines import guard
from megatron_rl.engines.serve import serve_model
from megatron_rl.engines.server_process import ServerFailed, ServerProcess
from megatron_rl.engines.sglang import _require_free, _write_keys, head_address, sglang_from_config
from megatron_rl.engines.sglang_command import SglangOptions, command_line, environment
from megatron_rl.engines.sglang_install import Installed, SglangError, inspect, require_tested
from tests.processes import wait_until
from tests.unit.rollout_rig import config

CPU, CUDA = Installed("0.5.23", "2.13.0+cpu"), Installed("0.5.23", "2.14.1")
OPTIONS = SglangOptions("/model", "/venv/bin/python", port=30000)


def words(options: SglangOptions = OPTIONS, installed: Installed = CUDA, head: str | None = None) -> str:
    return " ".join(command_line(options, 30000, installed, None, head))


def test_the_command_line_says_what_was_chosen_and_nothing_else() -> None:
    assert words() == (
        "/venv/bin/python -m sglang.launch_server --model-path /model --host 127.0.0.1 --port 30000 "
        "--weight-version default --dtype auto --max-running-requests 256"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tp": 4, "dp": 2, "ep": 4}, "--tp-size 4 --dp-size 2 --ep-size 4"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
        ({"memory_fraction": 0.8}, "--mem-fraction-static 0.8"),
        ({"context_length": 4104}, "--context-length 4104"),
        ({"deterministic": True}, "--enable-deterministic-inference"),
        ({"routed_experts": True}, "--enable-return-routed-experts"),
        ({"seed": 7}, "--random-seed 7"),
        ({"first_device": 4}, "--base-gpu-id 4"),
        ({"shares_devices": True}, "--enable-memory-saver"),
        ({"weight_version": "12"}, "--weight-version 12"),
    ],
)
def test_each_option_reaches_the_command_line(changes: dict[str, object], expected: str) -> None:
    assert expected in words(dataclasses.replace(OPTIONS, **changes))
    assert expected not in words()


def test_words_of_the_user_come_last_and_win() -> None:
    extra = ("--max-running-requests", "8")
    assert words(dataclasses.replace(OPTIONS, extra_args=extra)).endswith("256 --max-running-requests 8")


@pytest.mark.parametrize(
    ("extra", "instead"),
    [
        (["--log-level", "debug", "--tp", "2"], r"--tp would .* leave it out, and set engine\.tp"),
        (["--tensor-parallel-size=2"], r"--tensor-parallel-size=2 would .* engine\.tp"),
        (["--ep", "2"], r"engine\.ep"),
        (["--dp", "2"], r"engine\.dp"),
        (["--pipeline-parallel-size", "2"], r"engine\.tp; weights are not sent to pipeline stages"),
        (["--dtype", "half"], r"engine\.dtype"),
        (["--model", "/other"], r"model\.path"),
        (["--port", "1"], "chooses a free port"),
        (["--host=0.0.0.0"], "chooses a free port"),
        (["--api-key", "k"], r"engine\.api_key_file"),
        (["--admin-api-key", "k"], r"engine\.api_key_file"),
        (["--nnodes", "2"], r"engine\.nodes_per_replica"),
        (["--base-gpu-id", "1"], r"cluster\.placement"),
        (["--config", "mine.yaml"], r"into engine\.extra_args"),
    ],
)
def test_words_that_would_override_what_the_run_counts_on_are_refused_with_what_to_set(
    tmp_path: Path, extra: list[str], instead: str
) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.extra_args: .*{instead}"):
        config(tmp_path, Path("/model"), [], engine={"kind": "sglang", "extra_args": extra})


def test_other_words_pass_whatever_they_begin_with(tmp_path: Path) -> None:
    harmless = ["--model-checksum", "auto", "--dp-attention-local-control-broadcast", "--ep-dispatch-algorithm=static"]
    harmless += ["--host-memory", "--port-x", "-", "--", "--enable-fp32-lm-head", "--random-seed", "7", "EAGLE"]
    cfg = config(tmp_path, Path("/model"), [], engine={"kind": "sglang", "extra_args": harmless})
    assert cfg.engine.extra_args == harmless


def test_nodes_of_one_replica_meet_at_the_address_of_the_first(tmp_path: Path) -> None:
    first = dataclasses.replace(OPTIONS, tp=16, nodes=2, head_file=str(tmp_path / "head.json"), ready_timeout_s=5)
    second = dataclasses.replace(first, node_rank=1)
    address = head_address(first)
    assert head_address(second) == address
    assert f"--nnodes 2 --node-rank 1 --dist-init-addr {address}" in words(second, head=address)
    lost = dataclasses.replace(second, head_file=str(tmp_path / "none.json"), ready_timeout_s=0.1)
    with pytest.raises(ServerFailed, match=r"node 1 of 2 waited 0.1 s .* from the replica's first node"):
        head_address(lost)


def test_tensor_parallel_ranks_must_fill_the_nodes() -> None:
    with pytest.raises(SglangError, match=r"engine\.tp=3 is not a multiple of engine\.nodes_per_replica=2"):
        dataclasses.replace(OPTIONS, tp=3, nodes=2)


def test_without_a_gpu_the_plain_kernels_are_chosen_and_memory_is_bounded() -> None:
    said = words(dataclasses.replace(OPTIONS, context_length=1000, max_running_requests=10), CPU)
    assert "--device cpu --attention-backend torch_native" in said
    assert "--max-total-tokens 10000" in said
    with pytest.raises(SglangError, match="no deterministic attention on a CPU"):
        words(dataclasses.replace(OPTIONS, deterministic=True), CPU)


def test_the_server_gets_the_shims_on_a_cpu_only_and_none_of_our_python() -> None:
    ours = {"PATH": "/bin", "PYTHONPATH": "/checkout", "VIRTUAL_ENV": "/venv", "PYTHONDONTWRITEBYTECODE": "1"}
    on_cpu, on_gpu = (environment(OPTIONS, installed, ours) for installed in (CPU, CUDA))
    assert on_cpu["PYTHONPATH"].endswith("sglang_cpu/shims")
    assert not {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"} & on_gpu.keys()
    assert on_gpu["PATH"] == "/bin"
    cpus = len(os.sched_getaffinity(0))
    shares = environment(dataclasses.replace(OPTIONS, tp=2), CPU, ours)["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(shares) == 2
    assert sum(len(share.split(",")) for share in shares) == max(cpus, 2)


def test_keys_are_told_in_a_file_of_our_own(tmp_path: Path) -> None:
    path = _write_keys(tmp_path, "secret")
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load(path.read_text()) == {"api-key": "secret", "admin-api-key": "secret"}
    assert _write_keys(tmp_path, None) is None
    assert "secret" not in " ".join(command_line(OPTIONS, 1, CUDA, path, None))


# ------------------------------------------------------------------------------------------------------ what is refused


def test_no_interpreter_and_no_sglang_in_it_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(SglangError, match=r"no such file; launch/install_sglang\.sh installs SGLang"):
        inspect(str(tmp_path / "python"))
    with pytest.raises(SglangError, match="a directory, not an interpreter; launch"):
        inspect(str(tmp_path))
    with pytest.raises(SglangError, match="there is no SGLang in its environment"):
        inspect(sys.executable)
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(SglangError, match="is not a working Python interpreter"):
        inspect(str(tmp_path / "python"))


def test_another_version_is_refused_with_the_tested_ones_unless_asked_for(tmp_path: Path) -> None:
    def python(version: str) -> str:
        (tmp_path / version).write_text(f"""#!/bin/sh\necho '["{version}", "2.11.0"]'\n""")
        (tmp_path / version).chmod(0o755)
        return str(tmp_path / version)

    with pytest.raises(SglangError, match=r"has SGLang 0\.5\.15; tested is 0\.5\.23"):
        require_tested(python("0.5.15"), untested=False)
    assert require_tested(python("0.5.15"), untested=True) == Installed("0.5.15", "2.11.0")
    assert require_tested(python("0.5.23"), untested=False).sglang == "0.5.23"


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    def serve() -> None:
        serve_model("sglang", tmp_path, "127.0.0.1", 0, "auto", None, sys.executable, {})

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SglangError, match=r"no config\.json there"):
            serve()
        (tmp_path / "config.json").touch()
        with pytest.raises(SglangError, match=r"no \*\.safetensors files there"):
            serve()
    finally:
        signal.signal(signal.SIGTERM, handlers[0])
        signal.signal(signal.SIGINT, handlers[1])


def test_a_port_that_is_taken_is_refused_and_one_that_our_supervisor_keeps_is_not() -> None:
    with reserved_port("127.0.0.1", for_sglang=True) as kept:
        port = kept.getsockname()[1]
        _require_free("127.0.0.1", port)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
            with pytest.raises(SglangError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
                _require_free("127.0.0.1", port)


# -------------------------------------------------------------------------------------------------------- configuration


def test_the_options_of_a_run_reach_the_server(tmp_path: Path) -> None:
    engine = {"kind": "sglang", "python": "/venv/bin/python", "tp": 2, "extra_args": ["--log-level", "debug"]}
    cfg = config(tmp_path, Path("/model"), [], engine=engine, deterministic=False)
    (tmp_path / KEY_FILE).parent.mkdir()
    (tmp_path / KEY_FILE).write_text("of-the-run\n")
    options = sglang_from_config(cfg, 1, "127.0.0.1", 30001, place=1)
    assert (options.tp, options.first_device) == (2, 2)
    assert options.extra_args == ("--log-level", "debug")
    assert options.api_key == "of-the-run"
    assert options.weight_version == "0"
    assert options.dtype == "float32"
    assert options.endpoint_file == str(tmp_path / "endpoints" / "engine-1.json")
    assert options.context_length == 128  # more than 40 + 8: SGLang's first request to itself has to fit
    longer = config(tmp_path, Path("/model"), [], engine={**engine, "context_length": 200}, deterministic=False)
    assert sglang_from_config(longer, 1, "127.0.0.1", 30001).context_length == 208  # SGLang keeps some for itself


def test_settings_of_sglang_are_refused_for_the_embedded_engine() -> None:
    with pytest.raises(ValueError, match="tp=2 needs kind: sglang"):
        EngineConfig(tp=2)
    assert EngineConfig(kind="sglang", tp=2).tp == 2


def test_the_key_of_a_run_is_used_unless_servers_are_given(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).parent.mkdir()
    (tmp_path / KEY_FILE).write_text("abc")
    assert EngineConfig().read_api_key(tmp_path) == "abc"
    assert EngineConfig(urls=["http://a:1"]).read_api_key(tmp_path) is None
    (tmp_path / "mine").write_text("mine\n")
    mine = str(tmp_path / "mine")
    assert EngineConfig(urls=["http://a:1"], api_key_file=mine).read_api_key(tmp_path) == "mine"
    (tmp_path / "mine").write_text("two words\n")
    with pytest.raises(ConfigError, match="must hold one word"):
        EngineConfig(api_key_file=mine).read_api_key(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.api_key_file=/nonexistent: cannot be read"):
        EngineConfig(api_key_file="/nonexistent").read_api_key(tmp_path)


# ------------------------------------------------------------------------------------------------------- the processes

# A server that starts another process, which hears no TERM, before it serves, and shares memory as SGLang's do.
FAMILY = """
import http.server, mmap, os, signal, subprocess, sys
with open(f"/dev/shm/sglang_loads_test_{os.getpid()}.shm", "w+b") as file:
    file.truncate(4096)
    shared = mmap.mmap(file.fileno(), 4096)
child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready)
print("serving", flush=True)
server.serve_forever()
"""
LAUNCHER = """
import os, sys
from megatron_rl.engines.server_process import ServerProcess
with ServerProcess("the server", [sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ, 1.0) as server:
    server.wait_ready("http://127.0.0.1:" + sys.argv[2], 60.0, lambda: False, "deadline")
    print(server._process.pid, flush=True)
    server.wait(lambda: False)
"""


def family(port: int) -> ServerProcess:
    return ServerProcess("the server", [sys.executable, "-c", FAMILY, str(port)], os.environ, 0.5)


def shared_by(session: int) -> Path:
    return Path(f"/dev/shm/sglang_loads_test_{session}.shm")


def test_the_end_of_a_server_is_the_end_of_all_its_processes() -> None:
    with reserved_port("127.0.0.1", for_sglang=True) as kept:
        port = kept.getsockname()[1]
        with family(port) as server:
            assert server.wait_ready(f"http://127.0.0.1:{port}", 60.0, lambda: False, "deadline")
            session = server._process.pid
            assert len(guard.members(session)) == 2
            assert shared_by(session).exists()
        assert guard.members(session) == []
        assert not shared_by(session).exists()


def test_a_killed_launcher_leaves_no_process_of_its_server() -> None:
    with reserved_port("127.0.0.1", for_sglang=True) as kept:
        argv = [sys.executable, "-c", LAUNCHER, FAMILY, str(kept.getsockname()[1])]
        launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert launcher.stdout is not None
        session = int(launcher.stdout.readline())
        assert len(guard.members(session)) == 2
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        wait_until(lambda: not guard.members(session) and not shared_by(session).exists())


def test_a_server_that_ends_before_it_serves_shows_what_it_said() -> None:
    argv = [sys.executable, "-c", "import sys; print('loading'); sys.exit('no such tensor')"]
    with ServerProcess("the server", argv, os.environ, 1.0) as server:
        with pytest.raises(
            ServerFailed, match=r"ended with exit code 1 before it served(.|\n)*loading\n.*no such tensor"
        ):
            server.wait_ready("http://127.0.0.1:1", 60.0, lambda: False, "deadline")


def test_a_server_that_never_answers_is_given_up_at_the_deadline() -> None:
    argv = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]
    with ServerProcess("the server", argv, os.environ, 1.0) as server:
        with pytest.raises(ServerFailed, match=r"did not answer http://127\.0\.0\.1:1/ready within 0\.5 s \(the key\)"):
            server.wait_ready("http://127.0.0.1:1", 0.5, lambda: False, "the key")
        assert not server.wait_ready("http://127.0.0.1:1", 60.0, lambda: True, "the key")
