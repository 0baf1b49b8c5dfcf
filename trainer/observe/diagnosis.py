"""The verdict: what a training loses its time to, and what to change; from metrics alone, to be replayed.

What the run was given too little of, or asked too much of, explains whatever else is seen: these rules come
first. Of the others the one that costs most is named. Shares are of the wall's time without the start and
without compiling.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trainer.config.training import CheckpointConfig, EvaluationConfig
from trainer.observe.phases import PHASES
from trainer.observe.timeline import OF_HOST

Metrics = Mapping[str, float | int | str]

_BUSY = 0.7  # of the device: from here on the loader is not what to change
_COMPUTING = ("forward", "backward", "update")
_SECONDS = 1.0  # a whole run below this is not judged: what it loses is its beginning and its end


@dataclass(frozen=True)
class Facts:
    """Facts about a run that the metrics don't contain.

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
        profiled: Whether a profiler looks on, whose own cost is in every time.
        fewer_checkpoints: What makes them cheaper in this configuration, see `fewer_checkpoints`.
        fewer_evaluations: Likewise for evaluations.
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
    profiled: bool = False
    fewer_checkpoints: str = "raise checkpoint.every, or use a faster disk"
    fewer_evaluations: str = "raise evaluation.every"


class Verdict(NamedTuple):
    """Bottleneck of a run.

    Attributes:
        cause: Which; "none" where nothing does, "unknown" where the times don't say.
        share: Upper bound of its cost, as a fraction of the wall time, 0 to 1.
        text: A line for people: what, how much, what to do.
    """

    cause: str
    share: float
    text: str


@dataclass(frozen=True)
class _Evidence:
    metrics: Metrics
    facts: Facts

    def get(self, name: str) -> float:
        return _number(self.metrics, name)

    @property
    def wall(self) -> float:
        return max(self.get("time/wall") - self.get("time/start") - self.get("time/compile"), 1e-9)

    @property
    def computing(self) -> float:
        """Fraction of the wall time in forward, backward and update, compilation included."""
        seconds = sum(self.get(f"time/{phase}") for phase in _COMPUTING) - self.get("time/compile")
        return min(max(seconds, 0.0) / self.wall, 1.0)

    def share(self, phase: str) -> float:
        return self.get(f"time/{phase}") / self.wall

    @property
    def busy(self) -> float:
        """Fraction of the steps' time in which the device computes."""
        if "gpu/utilization" in self.metrics:
            return self.get("gpu/utilization")
        steps = 1.0 - sum(self.share(phase) for phase in OF_HOST if phase != "start")
        return self.computing / max(steps, 1e-9)

    @property
    def device(self) -> str:
        return "GPU" if self.facts.on_gpu else "model"

    @property
    def cpu_line(self) -> str:
        if "cpu/used" not in self.metrics:  # a run too short for a look at them
            return f"of {self.facts.cpus:g} CPUs"
        return f"{self.get('cpu/used'):.1f} of {self.facts.cpus:g} CPUs busy"

    @property
    def others_disturb(self) -> bool:
        return self.get("cpu/others") >= 0.2 * self.facts.cpus

    @property
    def idle_cpus(self) -> float:
        if "cpu/used" not in self.metrics:
            return 0.0
        return self.facts.cpus - self.get("cpu/used") - self.get("cpu/others")


def diagnose(metrics: Metrics, facts: Facts) -> Verdict:
    """Names what costs most.

    Returns:
        The verdict; its cause is "none" where nothing is worth changing.
    """
    evidence = _Evidence(metrics, facts)
    for rules in (_LIMITS, _LOSSES):
        found = [verdict for rule in rules if (verdict := rule(evidence)) is not None]
        if found:
            return max(found, key=lambda verdict: verdict.share)
    if facts.waits:
        return Verdict("sync", 0.0, f"{_sync(facts.waits)}; it costs nothing that can be seen here")
    computing = f"forward, backward and update take {evidence.computing:.0%} of the time"
    if evidence.computing >= 0.5:
        return Verdict("none", 0.0, f"no bottleneck: {computing}")
    shares = {phase: evidence.share(phase) for phase in PHASES if phase not in ("start", *_COMPUTING)}
    most = sorted(shares, key=shares.__getitem__, reverse=True)[:3]
    rest = ", ".join(f"{phase} {shares[phase]:.0%}" for phase in most if shares[phase] >= 0.01)
    return Verdict("none", 0.0, f"no single bottleneck: {computing} ({rest})")


def diagnose_run(metrics: Metrics, facts: Facts) -> Verdict:
    """Judges all of an attempt, unless its times say nothing: a second's training, or a profiled one."""
    if facts.profiled:
        return Verdict("unknown", 0.0, "not judged: the profiler's own cost is in the times")
    evidence = _Evidence(metrics, facts)
    if evidence.wall < _SECONDS:
        compiling = evidence.get("time/compile")
        also = f" and {compiling:.1f} s of compiling" if compiling >= 0.05 else ""
        text = f"too short to judge: {evidence.wall:.1f} s of training after the start{also}"
        return Verdict("unknown", 0.0, text)
    return diagnose(metrics, facts)


def _verdict(cause: str, share: float, what: str, do: str) -> Verdict:
    return Verdict(cause, share, f"{cause}: {what}: {do}")


# --- limits ---


def _throttled_gpu(e: _Evidence) -> Verdict | None:
    share, reason = e.get("gpu/throttled"), str(e.metrics.get("gpu/throttle_reason", ""))
    if share < 0.3 or not reason or e.busy < 0.3:
        return None
    at = f"{e.get('gpu/clock_mhz'):.0f} MHz, {e.get('gpu/temperature_c'):.0f} C"
    what = f"the GPU slows itself down {share:.0%} of the time at {at}"
    if "power" in reason:
        return _verdict("power", share, what, "raise the power limit (nvidia-smi -pl)")
    return _verdict("thermal", share, what, "check cooling and the inlet air")


def _quota(e: _Evidence) -> Verdict | None:
    share = e.get("cpu/throttled")
    if share < 0.1 or (e.busy >= _BUSY and e.facts.on_gpu):
        return None
    what = f"the container's limit of {e.facts.cpus:g} CPUs stops the job {share:.0%} of the time"
    return _verdict(
        "quota", share, what, "raise it (docker run --cpus, resources.limits.cpu), or use fewer workers"
    )


def _threads(e: _Evidence) -> Verdict | None:
    asked = e.facts.threads * e.facts.local_ranks
    if asked <= e.facts.cpus + 0.5 or e.facts.on_gpu or e.facts.threads == 1:
        return None
    what = f"{asked} intra-op threads on {e.facts.cpus:g} CPUs wait for each other"
    return _verdict("threads", 1 - e.facts.cpus / asked, what, "set parallel.threads=auto")


# --- losses ---


def _others(e: _Evidence) -> Verdict | None:
    others = e.get("cpu/others")
    starved = max(e.get("cpu/starved"), e.share("data") * (e.get("loader/starved") > 0.2))
    if not e.others_disturb or starved < 0.1 or (e.facts.on_gpu and e.busy >= _BUSY):
        return None
    what = f"other processes use {others:.1f} of {e.facts.cpus:g} CPUs; the training waits for a CPU "
    what += f"{starved:.0%} of the time"
    return _verdict("cpu-others", starved, what, "stop them, or train on another machine")


def _straggler(e: _Evidence) -> Verdict | None:
    excess = e.get("slow_excess")
    if excess < 0.1 or e.facts.ranks < 2:
        return None
    rank, phase = int(e.get("slow_rank")), e.metrics.get("slow_phase", "forward")
    what = f"rank {rank} takes {excess:.0%} of the time longer than the others, mostly in {phase}"
    return _verdict("straggler", excess, what, "look at its host and device")


def _collector(e: _Evidence) -> Verdict | None:
    share = e.share("gc")
    if share < 0.05:
        return None
    what = f"Python's garbage collector takes {share:.0%} of the time"
    return _verdict("gc", share, what, "keep fewer objects, or call gc.freeze() after they are made")


def _data(e: _Evidence) -> Verdict | None:
    share = e.share("data")
    if share < 0.15 or e.busy >= _BUSY:
        return None
    faster = f"{1 / (1.01 - share):.1f} x as fast without"
    lead = f"the {e.device} waits for data {share:.0%} of the time ({faster})"
    each, workers = e.get("loader/seconds_per_sample") * 1e3, int(e.get("loader/workers"))
    if not workers and each < 0.05:  # samples in memory: what costs is the batch, not the sample
        what = f"{lead}; the rank's own process collates batches of {e.facts.micro_batch_size}"
        return _verdict("data-batch", share, what, "raise data.micro_batch_size and data.global_batch_size")
    if e.get("loader/blocked") >= 0.5:
        where, what = ("network", "the network") if e.facts.remote else ("disk", "the disk or file system")
        do = (
            "copy the data to a local disk first"
            if e.facts.remote
            else "use a faster disk, or pack the data into few files (trainer data pack)"
        )
        blocked = f"{e.get('loader/blocked'):.0%} of {each:.1f} ms per sample"
        what = f"{lead}; loading waits for {what} ({blocked})"
        return _verdict(f"data-{where}", share, what, f"raise data.workers and data.prefetch, {do}")
    if e.others_disturb and e.get("loader/starved") > 0.2:
        return None
    if e.idle_cpus >= 0.25 * e.facts.cpus and workers < e.facts.cpus:
        what = (
            f"{lead}, while {e.idle_cpus:.1f} CPUs are idle; {workers} workers take {each:.1f} ms per sample"
        )
        pack = ", or pack the data (trainer data pack --raw)" * e.facts.decodes
        return _verdict("data-workers", share, what, f"raise data.workers{pack}")
    pack = "pack the data (trainer data pack --raw), or " * e.facts.decodes
    return _verdict("data-cpu", share, f"{lead}; {e.cpu_line}, {each:.1f} ms per sample", f"{pack}add CPUs")


def _copy(e: _Evidence) -> Verdict | None:
    share = e.share("copy")
    if share < 0.1 or e.busy >= _BUSY:
        return None
    what = f"the GPU waits {share:.0%} of the time for copies of batches of {e.facts.micro_batch_size}"
    do = "raise ulimit -l so that they can be page-locked, or raise data.micro_batch_size"
    return _verdict("copy", share, what, do)


def _communication(e: _Evidence) -> Verdict | None:
    share = e.share("communication")
    if share < 0.25 or e.facts.ranks < 2 or _straggler(e):
        return None
    what = f"{share:.0%} of the time is communication of gradients that no computation overlaps"
    do = "raise data.global_batch_size (more accumulation), parallel.compress=bf16, or check the network"
    return _verdict("communication", share, what, do)


def _host(e: _Evidence) -> Verdict | None:
    idle = 1 - e.busy
    if not e.facts.on_gpu or "gpu/utilization" not in e.metrics or e.get("gpu/caught_up") < 0.7:
        return None
    if idle < 0.3 or e.share("data") + e.share("copy") + e.share("communication") > 0.3:
        return None
    if e.facts.waits:
        return Verdict("sync", idle, _sync(e.facts.waits))
    what = f"the GPU waits {idle:.0%} of the time for Python to launch kernels"
    return _verdict("host", idle, what, "compile.mode=reduce-overhead, or raise data.micro_batch_size")


def _sync(where: str) -> str:
    return (
        f"sync: the model waits for the device in each step at {where}: leave out .item() and similar calls"
    )


def _update(e: _Evidence) -> Verdict | None:
    share, samples = e.share("update"), e.facts.step_samples // e.facts.ranks
    if share < 0.2 or samples > 16:
        return None
    what = f"the optimizer takes {share:.0%} of the time, for steps of {samples} samples a rank"
    return _verdict("update", share, what, "raise data.global_batch_size and data.micro_batch_size")


def _memory(e: _Evidence) -> Verdict | None:
    if e.get("memory/retries") < 1:
        return None
    retries = f"{e.get('memory/retries'):.0f}"
    what = f"the GPU's memory is full: the allocator freed its cache and retried {retries} times"
    return _verdict("memory", 0.3, what, "lower data.micro_batch_size, or memory.checkpointing=blocks")


def fewer_checkpoints(checkpoint: CheckpointConfig, evaluation: EvaluationConfig) -> str:
    """Returns what makes checkpoints cheaper: the keys that make some in this configuration, and the disk."""
    intervals = [f"checkpoint.{name}" for name in ("every", "minutes") if getattr(checkpoint, name)]
    raised = [f"raise {' and '.join(intervals)}"] if intervals else []
    # A better evaluation is saved at once, but for that of the end, which is saved anyway.
    best = ["raise evaluation.every or set checkpoint.best=false"] * (
        checkpoint.best and evaluation.every != "end"
    )
    return ", or ".join([*raised, *best, "use a faster disk"])


def fewer_evaluations(config: EvaluationConfig) -> str:
    """Returns which key makes evaluations rarer, or faster if there is one only, at the end."""
    return "raise data.eval_batch_size" if config.every == "end" else "raise evaluation.every"


def _share_of(
    phase: str, least: float, what: str, do: Callable[[Facts], str]
) -> Callable[[_Evidence], Verdict | None]:
    def rule(e: _Evidence) -> Verdict | None:
        share = e.share(phase)
        if share < least:
            return None
        return _verdict(phase, share, f"{what} {share:.0%} of the time", do(e.facts))

    return rule


_LIMITS = (_throttled_gpu, _quota, _threads)
_LOSSES = (
    *(_others, _straggler, _collector, _data, _copy, _communication, _host, _update, _memory),
    _share_of(
        "checkpoint",
        0.1,
        "writing checkpoints stops the training",
        lambda facts: facts.fewer_checkpoints,
    ),
    _share_of("evaluation", 0.5, "evaluation takes", lambda facts: facts.fewer_evaluations),
    _share_of(
        "logging",
        0.1,
        "writing metrics stops the training",
        lambda _: "raise log.every, or use a faster disk",  # it is 1 or more
    ),
)


def merge(rows: list[Metrics]) -> dict[str, float | int | str]:
    """Merges records into one: seconds, energy and retries are added, others averaged over wall time."""
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


def explained(rows: list[Metrics]) -> dict[str, float | int | str]:
    """Merges the fields that a verdict and the totals of a run need; {} for no records."""
    merged = merge(rows)
    known = ("time/", "energy/", "cpu/", "gpu/", "loader/", "memory/retries", "slow_")
    kept = {name: value for name, value in merged.items() if name.startswith(known)}
    return {n: value for n, value in kept.items() if isinstance(value, str) or math.isfinite(value)}


def _slowest(rows: list[Metrics]) -> dict[str, float | int]:
    """Returns the rank that the others waited for most, less its own waits: none if they take turns."""
    excess: dict[int, float] = {}
    for row in rows:
        if "slow_rank" in row:
            rank = int(_number(row, "slow_rank"))
            excess[rank] = excess.get(rank, 0.0) + _number(row, "slow_excess") * _number(row, "time/wall")
    slow = max(excess, key=excess.__getitem__)
    net = 2 * excess[slow] - sum(excess.values())
    wall = sum(_number(row, "time/wall") for row in rows if "slow_rank" in row)
    return {"slow_rank": slow, "slow_excess": max(0.0, net / max(wall, 1e-9))}


def _number(row: Metrics, name: str) -> float:
    value = row.get(name, 0.0)
    return 0.0 if isinstance(value, str) else float(value)
