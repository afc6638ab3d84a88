"""The configuration files of the emulated cluster, and the ports that it may use."""

from __future__ import annotations

import os
import pwd
import socket
import stat
from pathlib import Path

FIRST_PORT, LAST_PORT, PORTS_EACH = 21000, 29000, 16
"""Below the range from which the kernel takes ports for outgoing connections."""
DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx", "/dev/tty0"]
"""Stand-ins for GPUs, which must be device files, where we may not make any."""

SLURM_CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={directory}/run/munge.sock
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/run/slurmctld.pid
SlurmdPidFile={directory}/run/slurmd-%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={directory}/log/jobcomp.log
SlurmdParameters=config_overrides
SlurmdTimeout={node_timeout_s}
ReturnToService=2
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=16000 Gres=gpu:{gpus}
{nodes}
PartitionName=main Nodes=ALL Default=YES DefaultTime=30 MaxTime=1-0 PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL DefaultTime=30 MaxTime=1-0 PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
"""


def write_settings(
    directory: Path, port: int, names: list[str], *, cpus: int, gpus: int, grace_s: int, node_timeout_s: int
) -> None:
    """Write slurm.conf, gres.conf and the nodes' hosts file. `port` is slurmctld's; the nodes take the next ones."""
    numbered = list(enumerate(names, start=1))
    (directory / "slurm.conf").write_text(
        SLURM_CONF.format(
            directory=directory,
            host=socket.gethostname(),
            port=port,
            user=pwd.getpwuid(os.getuid()).pw_name,
            cpus=cpus,
            gpus=gpus,
            grace_s=grace_s,
            node_timeout_s=node_timeout_s,
            nodes="\n".join(
                f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port + i}" for i, name in numbered
            ),
        )
    )
    (directory / "gres.conf").write_text("".join(f"Name=gpu File={path}\n" for path in _devices(directory, gpus)))
    hosts = Path("/etc/hosts").read_text() + "".join(f"127.0.0.{10 + i} {name}\n" for i, name in numbered)
    (directory / "hosts").write_text(hosts)


def _devices(directory: Path, count: int) -> list[str]:
    """Device files of our own (only root may make them), else some that every machine has."""
    folder = directory / "gpu"
    folder.mkdir(exist_ok=True)
    made = [folder / f"gpu{i}" for i in range(count)]
    try:
        for path in made:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        return DEVICES[:count]
    return [str(path) for path in made]


def reserve_ports() -> tuple[socket.socket, int]:
    """A block of PORTS_EACH free ports: the first, and what keeps the block ours until it is closed.

    The lock is an abstract unix socket: it belongs to the network namespace, as the ports do, and dies with us.
    """
    for first in range(FIRST_PORT, LAST_PORT, PORTS_EACH):
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0minislurm-{first}")
            for port in range(first, first + PORTS_EACH):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
        except OSError:
            lock.close()
        else:
            return lock, first
    raise OSError(f"no {PORTS_EACH} free ports in a row between {FIRST_PORT} and {LAST_PORT}")
