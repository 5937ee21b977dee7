"""A Slurm cluster on this machine: real munged, slurmctld and slurmd, each node in a network namespace of its own.

A node is a host: its own address and name, its own /dev/shm, and its own /var/tmp, which is what machines do not share.
It claims GPUs that are null devices, so that the shipped scripts run unedited. Needs root, and Debian's slurmctld,
slurmd, slurm-client, munge and iproute2. Everything is started here, found again here, and ended here.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = "10.213.7"
BRIDGE = "mdlmbr"
CONTROLLER_PORT, NODE_PORT = 16817, 16818
UP_SECONDS = 30.0
NEEDED = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "ip", "unshare")


def missing() -> str | None:
    """Why no cluster can be made here, if so."""
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurmctld slurmd slurm-client munge iproute2)"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    made = subprocess.run(["ip", "netns", "add", "mdlm-try"], capture_output=True)
    subprocess.run(["ip", "netns", "del", "mdlm-try"], capture_output=True)
    return "network namespaces are not allowed here" if made.returncode else None


@dataclass
class Lab:
    """Nodes n1, n2, ...; partition `main`, whose jobs are preempted by those of `high`, which have `grace` seconds."""

    num_nodes: int = 3
    gpus: int = 2
    down_seconds: int = 10  # after which a node that does not answer is lost
    grace: int = 90
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")))
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.num_nodes + 1)]

    def __enter__(self) -> "Lab":
        _clear(self.nodes)
        for name in ("log", "state", "spool", "munge"):
            (self.folder / name).mkdir(mode=0o700 if name == "munge" else 0o755)
        self.folder.chmod(0o755)
        (self.folder / "slurm.conf").write_text(self._settings())
        (self.folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n"
        )  # named, so that slurmd does not look for it
        if self.gpus:
            for number in range(self.gpus):
                subprocess.run(["mknod", self.folder / f"gpu{number}", "c", "1", "3"], check=True)
            files = f"{self.folder}/gpu[0-{self.gpus - 1}]"
            (self.folder / "gres.conf").write_text(f"NodeName=n[1-{self.num_nodes}] Name=gpu File={files}\n")
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        try:
            self._connect()
            self._start_munge()
            self._daemon("slurmctld", "slurmctld", "-D", "-i")
            for node in self.nodes:
                self.start(node)
            wait_for("all nodes idle", lambda: self.states() == ["idle"] * self.num_nodes, UP_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            self.kill(node)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5.0)
            daemon.kill()
            daemon.wait()
        _clear(self.nodes)
        os.environ.pop("SLURM_CONF", None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, node: str) -> None:
        """The machine boots."""
        local = self.folder / "local" / node
        for path in (local, self.folder / "spool" / node):
            path.mkdir(parents=True, exist_ok=True)
        boot = (
            f"hostname {node}; mount -t tmpfs shm /dev/shm; mount --bind {local} /var/tmp; "
            f"exec slurmd -D -N {node} -f {self.folder}/slurm.conf"
        )
        apart = ["ip", "netns", "exec", node, "unshare", "--uts", "--ipc", "--mount", "--propagation", "private"]
        self._daemon(f"slurmd-{node}", *apart, "bash", "-c", boot)

    def kill(self, node: str) -> None:
        """The power goes: every process of the machine, at once."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self, node: str) -> list[int]:
        """All processes on a machine."""
        said = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True).stdout
        return [int(pid) for pid in said.split()]

    def cut(self, node: str) -> None:
        """Pull the network cable."""
        _ip("link", "set", f"v{node}", "down")

    def heal(self, node: str) -> None:
        _ip("link", "set", f"v{node}", "up")

    def states(self) -> list[str]:
        """Of the nodes, in their order."""
        return said("sinfo", "-h", "-N", "-p", "main", "-o", "%t").split()

    def _settings(self) -> str:
        host = socket.gethostname()
        gres = f" Gres=gpu:{self.gpus}" if self.gpus else ""
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={node} NodeAddr={NETWORK}.{10 + number} CPUs=16 RealMemory=64000{gres}"
            for number, node in enumerate(self.nodes, start=1)
        )
        return f"""
ClusterName=lab
SlurmctldHost={host}({NETWORK}.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={self.folder}/munge.socket,cred_expire=5
SlurmctldPort={CONTROLLER_PORT}
SlurmdPort={NODE_PORT}
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldLogFile={self.folder}/log/slurmctld.log
SlurmdLogFile={self.folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
{"GresTypes=gpu" if self.gpus else ""}
SlurmctldTimeout=10
SlurmdTimeout={self.down_seconds}
KillWait=20
BatchStartTimeout=10
MessageTimeout=5
TCPTimeout=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={self.grace}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""

    def _connect(self) -> None:
        """A bridge, with one cable to each node."""
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        hosts = [("127.0.0.1", "localhost"), (f"{NETWORK}.1", socket.gethostname())]
        hosts += [(f"{NETWORK}.{10 + number}", node) for number, node in enumerate(self.nodes, start=1)]
        for address, node in hosts[2:]:
            _ip("netns", "add", node)
            _ip("link", "add", f"v{node}", "type", "veth", "peer", "name", "eth0", "netns", node)
            _ip("link", "set", f"v{node}", "master", BRIDGE, "up")
            _ip("-n", node, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", node, "link", "set", device, "up")
            etc = Path("/etc/netns") / node  # shown as /etc inside
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text("".join(f"{number} {name}\n" for number, name in hosts))
            (etc / "nsswitch.conf").write_text("hosts: files\n")
            (etc / "resolv.conf").write_text("")

    def _start_munge(self) -> None:
        key, found = self.folder / "munge" / "key", self.folder / "munge.socket"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._daemon(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={found}",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/log/munged.log",
            f"--seed-file={self.folder}/munge/seed",
        )  # fmt: skip
        wait_for("munged's socket", found.exists, UP_SECONDS)

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            self.daemons.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
            )


def said(*command: str) -> str:
    """What a command prints; Slurm's own fail now and then while the controller is busy, and are asked again."""
    for _ in range(5):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if ended.returncode == 0:
            return ended.stdout
        time.sleep(1.0)
    raise RuntimeError(f"{' '.join(command)}: {ended.stderr}")


def wait_for(what: str, condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)


def _clear(nodes: list[str]) -> None:
    """What a lab that was killed may have left behind; nothing else has these names."""
    for node in nodes:
        subprocess.run(["ip", "link", "del", f"v{node}"], capture_output=True)
        subprocess.run(["ip", "netns", "del", node], capture_output=True)
        shutil.rmtree(Path("/etc/netns") / node, ignore_errors=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
