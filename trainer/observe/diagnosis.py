"""The verdict: what a training loses its time to, and what to change; from figures alone, to be replayed.

What the run was given too little of, or asked too much of, explains whatever else is seen: these rules come
first. Of the others the one that costs most is named. Shares are of the wall's time without the start.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trainer.observe.timeline import OF_HOST

Figures = Mapping[str, float | int | str]

_BUSY = 0.7  # of the device: from here on the loader is not what to change


@dataclass(frozen=True)
class Facts:
    """What the figures don't say about a run.

    Attributes:
        on_gpu: Whether it trains on GPUs.
        ranks: All of them.
        local_ranks: Those of this host.
        threads: Intra-op threads of a rank.
        cpus: CPUs that this host's part of the job may use.
        step_samples: Global batch.
        micro_batch_size: Samples of a micro-batch.
        remote: Whether the data comes over the network.
        decodes: Whether samples are decoded, so that `trainer data pack` makes them cheaper.
        waits: "file:line" of what makes the model wait for the device, or "".
        memory_bytes: That the host's part of the job may use, or None where nothing limits it.
    """

    on_gpu: bool
    ranks: int
    local_ranks: int
    threads: int
    cpus: float
    step_samples: int
    micro_batch_size: int
    remote: bool = False
    decodes: bool = False
    waits: str = ""
    memory_bytes: float | None = None


class Verdict(NamedTuple):
    """What holds a run up.

    Attributes:
        cause: Which; "none" where nothing does.
        share: Of the wall's time that it costs, at most; 0 to 1.
        text: A line for people: what, how much, what to do.
    """

    cause: str
    share: float
    text: str


@dataclass(frozen=True)
class _Evidence:
    figures: Figures
    facts: Facts

    def get(self, name: str) -> float:
        value = self.figures.get(name, 0.0)
        return float(value) if not isinstance(value, str) else 0.0

    @property
    def wall(self) -> float:
        return max(self.get("time/wall") - self.get("time/start"), 1e-9)

    def share(self, phase: str) -> float:
        return self.get(f"time/{phase}") / self.wall

    @property
    def busy(self) -> float:
        """Share of the steps in which the device computes."""
        if "gpu/utilisation" in self.figures:
            return self.get("gpu/utilisation")
        steps = 1.0 - sum(self.share(phase) for phase in OF_HOST if phase != "start")
        return sum(self.share(phase) for phase in ("forward", "backward", "update")) / max(steps, 1e-9)

    @property
    def device(self) -> str:
        return "GPU" if self.facts.on_gpu else "model"

    @property
    def cpu_line(self) -> str:
        if "cpu/used" not in self.figures:  # a run too short for a look at them
            return f"of {self.facts.cpus:g} CPUs"
        return f"{self.get('cpu/used'):.1f} of {self.facts.cpus:g} CPUs busy"

    @property
    def others_disturb(self) -> bool:
        return self.get("cpu/others") >= 0.2 * self.facts.cpus

    @property
    def idle_cpus(self) -> float:
        if "cpu/used" not in self.figures:
            return 0.0
        return self.facts.cpus - self.get("cpu/used") - self.get("cpu/others")


def diagnose(figures: Figures, facts: Facts) -> Verdict:
    """Names what costs most.

    Args:
        figures: Of one row, or of many merged by `merge`.
        facts: What they don't say.

    Returns:
        The verdict; its cause is "none" where nothing is worth changing.
    """
    evidence = _Evidence(figures, facts)
    for rules in (_LIMITS, _LOSSES):
        found = [verdict for rule in rules if (verdict := rule(evidence)) is not None]
        if found:
            return max(found, key=lambda verdict: verdict.share)
    if facts.waits:
        return Verdict("sync", 0.0, f"{_sync(facts.waits)}; it costs nothing that can be seen here")
    computing = sum(evidence.share(phase) for phase in ("forward", "backward", "update"))
    return Verdict("none", 0.0, f"nothing holds it up: it computes {computing:.0%} of the time")


# --- limits ---


def _throttled_gpu(e: _Evidence) -> Verdict | None:
    share, reason = e.get("gpu/throttled"), str(e.figures.get("gpu/throttle_reason", ""))
    if share < 0.3 or not reason or e.busy < 0.3:
        return None
    cause = "power" if "power" in reason else "thermal"
    do = "raise the power limit (nvidia-smi -pl)" if cause == "power" else "check cooling and the inlet air"
    clock = f" at {e.get('gpu/clock_mhz'):.0f} MHz, {e.get('gpu/temperature_c'):.0f} C"
    return Verdict(cause, share, f"{cause}: the GPU slows itself down {share:.0%} of the time{clock}: {do}")


def _quota(e: _Evidence) -> Verdict | None:
    share = e.get("cpu/throttled")
    if share < 0.1 or (e.busy >= _BUSY and e.facts.on_gpu):
        return None
    text = f"quota: the container's limit of {e.facts.cpus:g} CPUs stops the job {share:.0%} of the time"
    return Verdict(
        "quota", share, f"{text}: raise it (docker run --cpus, resources.limits.cpu), or use fewer workers"
    )


def _threads(e: _Evidence) -> Verdict | None:
    asked = e.facts.threads * e.facts.local_ranks
    if asked <= e.facts.cpus + 0.5 or e.facts.on_gpu or e.facts.threads == 1:
        return None
    text = f"threads: {asked} intra-op threads on {e.facts.cpus:g} CPUs wait for each other"
    return Verdict("threads", 1 - e.facts.cpus / asked, f"{text}: set parallel.threads=auto")


# --- losses ---


def _others(e: _Evidence) -> Verdict | None:
    others = e.get("cpu/others")
    starved = max(e.get("cpu/starved"), e.share("data") * (e.get("loader/starved") > 0.2))
    if not e.others_disturb or starved < 0.1 or (e.facts.on_gpu and e.busy >= _BUSY):
        return None
    text = f"cpu-others: other processes of this machine use {others:.1f} of {e.facts.cpus:g} CPUs, and the "
    text += f"training is kept from them {starved:.0%} of the time"
    return Verdict("cpu-others", starved, f"{text}: end those, or move one of the two")


def _straggler(e: _Evidence) -> Verdict | None:
    excess = e.get("slow_excess")
    if excess < 0.1 or e.facts.ranks < 2:
        return None
    rank, phase = int(e.get("slow_rank")), e.figures.get("slow_phase", "forward")
    text = f"straggler: rank {rank} takes {excess:.0%} of the time longer than the others, mostly in {phase}"
    return Verdict("straggler", excess, f"{text}: look at its host and device")


def _collector(e: _Evidence) -> Verdict | None:
    share = e.share("gc")
    if share < 0.05:
        return None
    text = f"gc: Python's garbage collector takes {share:.0%} of the time"
    return Verdict("gc", share, f"{text}: keep fewer objects alive, or call gc.freeze() once they are made")


def _data(e: _Evidence) -> Verdict | None:
    share = e.share("data")
    if share < 0.15 or e.busy >= _BUSY:
        return None
    faster = f"without that {1 / (1.01 - share):.1f} x as fast"
    lead = f"the {e.device} waits for data {share:.0%} of the time ({faster})"
    each, workers = e.get("loader/seconds_per_sample") * 1e3, int(e.get("loader/workers"))
    if e.get("loader/blocked") >= 0.5:
        where, what = ("network", "the network") if e.facts.remote else ("disk", "the disk or file system")
        do = (
            "copy the data to a local disk first"
            if e.facts.remote
            else "use a faster disk, or pack the data into few files (trainer data pack)"
        )
        text = f"data-{where}: {lead}; loading waits for {what} "
        text += f"({e.get('loader/blocked'):.0%} of {each:.1f} ms per sample)"
        return Verdict(f"data-{where}", share, f"{text}: raise data.workers and data.prefetch, {do}")
    if e.others_disturb and e.get("loader/starved") > 0.2:
        return None
    pack = "pack the data (trainer data pack --raw), or " if e.facts.decodes else ""
    if e.idle_cpus >= 0.25 * e.facts.cpus and workers < e.facts.cpus:
        text = f"data-workers: {lead}, while {e.idle_cpus:.1f} CPUs are idle; "
        text += f"{workers} workers take {each:.1f} ms per sample"
        return Verdict(
            "data-workers",
            share,
            f"{text}: raise data.workers{pack and ', or pack the data (trainer data pack --raw)'}",
        )
    text = f"data-cpu: {lead}; {e.cpu_line}, {each:.1f} ms per sample"
    return Verdict("data-cpu", share, f"{text}: {pack}add CPUs")


def _copy(e: _Evidence) -> Verdict | None:
    share = e.share("copy")
    if share < 0.1 or e.busy >= _BUSY:
        return None
    text = (
        f"copy: the GPU waits {share:.0%} of the time for batches of {e.facts.micro_batch_size} on their way"
    )
    return Verdict(
        "copy",
        share,
        f"{text}: raise ulimit -l so that they can be page-locked, or raise data.micro_batch_size",
    )


def _communication(e: _Evidence) -> Verdict | None:
    share = e.share("communication")
    if share < 0.25 or e.facts.ranks < 2 or _straggler(e):
        return None
    text = f"communication: {share:.0%} of the time goes to exchanging gradients that nothing hides"
    return Verdict(
        "communication",
        share,
        f"{text}: raise data.global_batch_size (more accumulation), parallel.compress=bf16, or check the "
        "network",
    )


def _host(e: _Evidence) -> Verdict | None:
    idle = 1 - e.busy
    if not e.facts.on_gpu or "gpu/utilisation" not in e.figures or e.get("gpu/caught_up") < 0.7:
        return None
    if idle < 0.3 or e.share("data") + e.share("copy") + e.share("communication") > 0.3:
        return None
    if e.facts.waits:
        return Verdict("sync", idle, _sync(e.facts.waits))
    text = f"host: the GPU waits {idle:.0%} of the time for Python to start its kernels"
    return Verdict("host", idle, f"{text}: compile.mode=reduce-overhead, or raise data.micro_batch_size")


def _sync(where: str) -> str:
    return f"sync: the model waits for the device in each step at {where}: leave out .item() and the like"


def _update(e: _Evidence) -> Verdict | None:
    share, samples = e.share("update"), e.facts.step_samples // e.facts.ranks
    if share < 0.2 or samples > 16:
        return None
    text = f"update: the optimiser takes {share:.0%} of the time, for steps of {samples} samples a rank"
    return Verdict("update", share, f"{text}: raise data.global_batch_size and data.micro_batch_size")


def _memory(e: _Evidence) -> Verdict | None:
    if e.get("memory/retries") < 1:
        return None
    text = "memory: the GPU's memory is full, and its allocator gave cached blocks back and tried again "
    text += f"{e.get('memory/retries'):.0f} times"
    return Verdict("memory", 0.3, f"{text}: lower data.micro_batch_size, or memory.checkpointing=blocks")


def _share_of(phase: str, least: float, what: str, do: str) -> Callable[[_Evidence], Verdict | None]:
    def rule(e: _Evidence) -> Verdict | None:
        share = e.share(phase)
        return (
            Verdict(phase, share, f"{phase}: {what} {share:.0%} of the time: {do}")
            if share >= least
            else None
        )

    return rule


_LIMITS = (_throttled_gpu, _quota, _threads)
_LOSSES = (
    _others,
    _straggler,
    _collector,
    _data,
    _copy,
    _communication,
    _host,
    _update,
    _memory,
    _share_of(
        "checkpoint",
        0.1,
        "writing checkpoints stops the training",
        "raise checkpoint.every, or use a faster disk",
    ),
    _share_of("evaluation", 0.5, "evaluation takes", "raise evaluate_every"),
    _share_of("logging", 0.1, "writing figures stops the training", "raise log.every, or use a faster disk"),
)


def merge(rows: list[Figures]) -> dict[str, float | int | str]:
    """One row from many: seconds, energy and retries are added, others averaged over the wall's time."""
    merged: dict[str, float | int | str] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [(row[name], _number(row, "time/wall")) for row in rows if name in row]
        texts = [value for value, _ in values if isinstance(value, str)]
        if texts:
            merged[name] = max(texts, key=texts.count)
        elif name == "slow_rank":
            merged |= _slowest(rows)
        elif name == "slow_excess":
            continue
        elif name.startswith(("time/", "energy/")) or name == "memory/retries":
            merged[name] = sum(float(value) for value, _ in values)
        else:
            weights = sum(weight for _, weight in values) or 1.0
            merged[name] = sum(float(value) * weight for value, weight in values) / weights
    return merged


def _slowest(rows: list[Figures]) -> dict[str, float | int]:
    """The rank that the others waited for longest, less what it waited for them: in turns is nobody."""
    excess: dict[int, float] = {}
    for row in rows:
        if "slow_rank" in row:
            rank = int(_number(row, "slow_rank"))
            excess[rank] = excess.get(rank, 0.0) + _number(row, "slow_excess") * _number(row, "time/wall")
    slow = max(excess, key=excess.__getitem__)
    net = 2 * excess[slow] - sum(excess.values())
    wall = sum(_number(row, "time/wall") for row in rows if "slow_rank" in row)
    return {"slow_rank": slow, "slow_excess": max(0.0, net / max(wall, 1e-9))}


def _number(row: Figures, name: str) -> float:
    value = row.get(name, 0.0)
    return 0.0 if isinstance(value, str) else float(value)
