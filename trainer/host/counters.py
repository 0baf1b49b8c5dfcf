"""Resources that a job uses of its host, from /proc and cgroups: counters that only grow, and rates from two
of them.

From the kernel's documentation: filesystems/proc.rst, cgroup-v2.rst, cgroup-v1/cpuacct.rst,
scheduler/sched-bwc.rst, scheduler/sched-stats.rst; and proc(5). Where a file is missing (macOS, gVisor) or
malformed, its metrics are absent; nothing raises.
"""

import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path

from trainer.host.kernel import figures_in, own_cgroups
from trainer.host.limits import Limits
from trainer.host.processes import tree
from trainer.host.reading import text_of

_TICKS = os.sysconf("SC_CLK_TCK")
_REFRESH = 20  # samples between two looks at who belongs to the tree
_QUOTA_FILES = {"cpu.max", "cpu.cfs_quota_us"}


class JobCounters:
    """Reads the counters of one job on this host.

    The job is the cgroup whose quota limits it, if there is one, since the quota counts all that runs there;
    else the tree of processes from `top` down. Processes that have ended count through those that waited for
    them. Network figures are those of all processes of the host (or container): the kernel counts them by
    interface. Traffic that bypasses the kernel (InfiniBand verbs, NVLink) is not included.
    """

    def __init__(self, limits: Limits, root: Path = Path("/"), pid: int = 0, top: int = 0) -> None:
        """Finds the files.

        Args:
            limits: Of this container, read below the same root.
            root: Folder that stands for "/".
            pid: The process whose memory, with that of its children, is read; 0: this one.
            top: The process above all ranks of this host; 0: `pid`.
        """
        self._root, self._proc = root, root / "proc"
        self._pid = pid or os.getpid()
        self._top = top or self._pid
        self._own = self._job = [self._pid]
        self._at_first = dict[int, int]()
        self._age, self._below = _REFRESH, ""
        source = limits.sources.get("cpus", "")
        quota = root / source.lstrip("/") if Path(source).name in _QUOTA_FILES else None
        self._period = 0.0 if quota is None else _period(quota)
        self._quota = limits.cpus * self._period
        self._stat = None if quota is None else quota.with_name("cpu.stat")
        self._usage = None if quota is None else _usage_file(root, quota)
        self._interfaces = _interfaces(root)

    def counters(self) -> dict[str, float]:
        """Seconds and bytes so far; names that `rates` understands."""
        self._look_around()
        found = dict[str, float]()
        stats = [read_stat(text_of(f"{self._proc}/{pid}/stat")) for pid in self._job]
        known = [seconds for seconds in stats if seconds is not None]
        if len(known) < len(stats):
            self._age = _REFRESH
        used = read_usage(text_of(self._usage)) if self._usage is not None else None
        if used is None and known:
            used = sum(known)
        if used is not None:
            found["used"] = used
        busy = read_busy(text_of(f"{self._proc}/stat"))
        if busy is not None:
            found["busy"] = busy
        waited = read_schedstat(text_of(f"{self._proc}/{self._pid}/schedstat"))
        if waited is not None:
            found["starved"] = waited
        if self._stat is not None and (throttled := read_throttled(text_of(self._stat))):
            found["throttled_periods"] = throttled[0] * self._period
            found["throttled_time"] = throttled[1]
            found["throttled_quota"] = throttled[0] * self._quota
        flows = [flow for pid in self._job if (flow := read_io(text_of(f"{self._proc}/{pid}/io")))]
        if flows:
            found["disk/read"] = sum(flow[0] for flow in flows)
            found["disk/written"] = sum(flow[1] for flow in flows)
        network = read_network(text_of(f"{self._proc}/net/dev"))
        if network:
            outside = [flow for name, flow in network.items() if self._counts(name)]
            found["network/received"] = sum(flow[0] for flow in outside)
            found["network/sent"] = sum(flow[1] for flow in outside)
            found["network/loopback"] = network.get("lo", (0.0, 0.0))[0]
        return found

    def resident(self) -> float | None:
        """Bytes of memory of `pid`, and what the processes below it took since they were first seen.

        What they had then is, after a fork, its parent's; to tell what isn't costs milliseconds for each.
        Shared memory and files count for `pid` alone.
        """
        sizes = {pid: read_statm(text_of(f"{self._proc}/{pid}/statm")) for pid in self._own}
        first = sizes.pop(self._pid)
        if first is None:
            return None
        private = {pid: size[0] - size[1] for pid, size in sizes.items() if size is not None}
        self._at_first = {pid: self._at_first.get(pid, pages) for pid, pages in private.items()}
        grown = sum(max(0, pages - self._at_first[pid]) for pid, pages in private.items())
        return float((first[0] + grown) * resource.getpagesize())

    def _look_around(self) -> None:
        """Finds who belongs to the job: now and then, and when the processes known of changed."""
        self._age += 1
        below = text_of(f"{self._proc}/{self._pid}/task/{self._pid}/children")
        if self._age > _REFRESH or below != self._below:
            self._age, self._below = 0, below
            self._own = tree(self._pid, self._proc)
            self._job = tree(self._top, self._proc) if self._top != self._pid else self._own

    def _counts(self, interface: str) -> bool:
        if self._interfaces:  # bridges, bonds and tunnels would count what passes a real one again
            return interface in self._interfaces
        return interface != "lo"


def rates(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Metrics of an interval: CPUs' worth of time, fractions of the wall time, bytes per second.

    Args:
        before: From `Host.counters`.
        after: The same, later.
        seconds: Between the two.
    """
    grown = {name: max(0.0, after[name] - before[name]) for name in after if name in before}
    speed = {name: value / seconds for name, value in grown.items()}
    metrics = dict[str, float]()
    if "used" in speed:
        metrics["cpu/used"] = speed["used"]
        if "busy" in speed:
            metrics["cpu/others"] = max(0.0, speed["busy"] - speed["used"])
    if "starved" in speed:
        metrics["cpu/starved"] = min(1.0, speed["starved"])
    if "throttled_time" in speed:
        metrics["cpu/throttled"] = _throttled(
            speed["throttled_periods"], speed["throttled_time"], speed["throttled_quota"]
        )
    for name, key in (
        ("disk/read", "disk/read_bytes_per_s"),
        ("disk/written", "disk/written_bytes_per_s"),
        ("network/received", "network/received_bytes_per_s"),
        ("network/sent", "network/sent_bytes_per_s"),
        ("network/loopback", "network/loopback_bytes_per_s"),
    ):
        if name in speed:
            metrics[key] = speed[name]
    return metrics


def _throttled(periods: float, stopped: float, ran: float) -> float:
    """Fraction of the wall time in which a quota stopped a cgroup.

    The kernel adds up the stopped time of every CPU that the group would have run on. In a period in which
    it was stopped it ran for its quota: of the time that it wanted the rest was lost.

    Args:
        periods: Fraction of the wall time in periods with a stop.
        stopped: CPUs' worth of time stopped.
        ran: CPUs' worth of time that the quota allowed in these periods.
    """
    if stopped <= 0 or stopped + ran <= 0:
        return 0.0
    return min(1.0, periods) * stopped / (stopped + ran)


def read_stat(text: str) -> float | None:
    """CPU seconds of a process and of the children that it waited for, from /proc/PID/stat."""
    words = text.rpartition(")")[2].split()  # the name before it may hold anything
    try:
        return sum(int(word) for word in words[11:15]) / _TICKS if len(words) > 14 else None
    except ValueError:
        return None


def read_io(text: str) -> tuple[int, int] | None:
    """Bytes read from and written to disks by a process and the children that it waited for."""
    read, written = map(figures_in(text).get, ("read_bytes", "write_bytes"))
    return None if read is None or written is None else (read, written)


def read_statm(text: str) -> tuple[int, int] | None:
    """Resident pages, and how many of them are files or shared memory, from /proc/PID/statm."""
    words = text.split()
    try:
        return (int(words[1]), int(words[2])) if len(words) > 2 else None
    except ValueError:
        return None


def read_busy(text: str) -> float | None:
    """CPU seconds in which the host worked, or its hypervisor for others, from /proc/stat."""
    words = text.partition("\n")[0].split()
    try:
        # user nice system idle iowait irq softirq steal; guests are in user and nice
        user, nice, system, idle, _, irq, softirq, steal = (int(word) for word in words[1:9])
    except ValueError:
        return None
    if words[0] != "cpu" or not idle + user:  # gVisor shows zeros
        return None
    return (user + nice + system + irq + softirq + steal) / _TICKS


def read_schedstat(text: str) -> float | None:
    """Seconds in which a process's main thread was ready to run and had no CPU, from /proc/PID/schedstat."""
    match = re.match(r"\d{1,20} (\d{1,20}) \d+", text)
    return int(match[1]) / 1e9 if match else None


def read_usage(text: str) -> float | None:
    """CPU seconds of a cgroup, from cpu.stat (v2) or cpuacct.usage (v1)."""
    if (micro := figures_in(text).get("usage_usec")) is not None:
        return micro / 1e6
    return int(text) / 1e9 if re.fullmatch(r"[0-9]{1,20}", text.strip()) else None


def read_throttled(text: str) -> tuple[int, float] | None:
    """Periods with a stop, and the stopped seconds of all CPUs, from cpu.stat (v1 or v2)."""
    found = figures_in(text)
    periods, micro, nano = map(found.get, ("nr_throttled", "throttled_usec", "throttled_time"))
    if periods is None or (micro is None and nano is None):
        return None
    return periods, (nano or 0) / 1e9 if micro is None else micro / 1e6


def read_network(text: str) -> dict[str, tuple[float, float]]:
    """Bytes received and sent, by interface, from /proc/net/dev."""
    found = dict[str, tuple[float, float]]()
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and len(words) >= 9 and words[0].isdecimal() and words[8].isdecimal():
            found[name.strip()] = (float(words[0]), float(words[8]))
    return found


def _interfaces(root: Path) -> set[str]:
    """Network interfaces with hardware behind them, or a hypervisor's; none in most containers."""
    try:
        return {entry.parent.name for entry in (root / "sys/class/net").glob("*/device")}
    except OSError:
        return set()


def _period(quota: Path) -> float:
    """Seconds of a quota's period; 0 if unknown."""
    if quota.name == "cpu.max":
        words = text_of(quota).split()
    else:
        words = ["", *text_of(quota.with_name("cpu.cfs_period_us")).split()]
    return int(words[1]) / 1e6 if len(words) == 2 and words[1].isdecimal() else 0.0


def _usage_file(root: Path, quota: Path) -> Path | None:
    """The file that counts what the cgroup of a quota used."""
    if quota.name == "cpu.max":
        return quota.with_name("cpu.stat")
    if (beside := quota.with_name("cpuacct.usage")).exists():  # mounted together, as is usual
        return beside
    # Mounted apart: of use only if this process is in the same cgroup of both hierarchies.
    paths = own_cgroups(root)
    if paths.get("cpu") is None or paths.get("cpu") != paths.get("cpuacct"):
        return None
    parts = list(quota.parent.relative_to(root).parts)
    if "cpu" not in parts:
        return None
    parts[parts.index("cpu")] = "cpuacct"
    other = root.joinpath(*parts, "cpuacct.usage")
    return other if other.exists() else None
