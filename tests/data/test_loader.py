"""Promise: workers, prefetch, start method and residence change nothing in a batch; /dev/shm isn't needed."""

import errno
import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.helpers.batches import CPU, FORK, Numbers, frozen, read_all, source
from tests.helpers.refusals import named, refused
from tests.helpers.waiting import until, until_gone
from trainer.config.data import DataConfig, LoaderConfig
from trainer.data.batch import Batch
from trainer.data.dataset import Arrays, Field
from trainer.data.loader import ResidentLoader, RingLoader, Source, make_loader
from trainer.data.sources import load_images
from trainer.data.workers import begin_worker
from trainer.host import processes
from trainer.launch.exit_record import dead_worker
from trainer.rng import Float32, Ints


@pytest.mark.parametrize("last", ["cross", "drop", "weighted"])
def test_the_number_of_workers_changes_nothing(last: str) -> None:
    what = source(Numbers(45), last)
    batches = what.share.batches()
    expected = read_all(RingLoader(what, CPU, 0, LoaderConfig()), batches)
    assert len(expected) == len(batches)
    config = LoaderConfig(prefetch=3, start_method="fork")
    assert read_all(RingLoader(what, CPU, 2, config), batches[3:]) == expected[3:]


@pytest.mark.xdist_group("forkserver")
def test_workers_that_are_not_forked_get_the_memory() -> None:
    what = source(Numbers(20))
    batches = what.share.batches()
    expected = read_all(RingLoader(what, CPU, 0, LoaderConfig()), batches)
    loader = RingLoader(what, CPU, 1, LoaderConfig(start_method="forkserver"))
    before = threading.active_count()
    assert read_all(loader, batches) == expected
    loader.close()
    until(lambda: threading.active_count() <= before)  # a process with other threads forks no workers


def test_residence_changes_nothing() -> None:
    what = source(load_images(DataConfig(), seed=0).train, "cross", micro_batch_size=32)
    batches = what.share.batches()[:40]
    resident = make_loader(what, CPU, LoaderConfig(), cpu_workers=2)
    travelling = make_loader(what, CPU, LoaderConfig(resident=False), cpu_workers=0)
    assert isinstance(resident, ResidentLoader) and isinstance(travelling, RingLoader)
    assert read_all(resident, batches) == read_all(travelling, batches)


def ours() -> set[BaseProcess]:
    return set(multiprocessing.active_children())


def test_no_thread_and_no_worker_outlives_close() -> None:
    """By chance one thread in six did, and a second `fit` of the process could fork no workers."""
    before, threads, what = ours(), threading.active_count(), source(Numbers(200))
    for _ in range(20):
        loader = RingLoader(what, CPU, 2, FORK)
        next(loader(what.share.batches()))
        assert len(ours() - before) == 2
        loader.close()
        assert threading.active_count() == threads
        until(lambda: ours() <= before)


def worker_of(what: Source) -> tuple[RingLoader, Any]:
    before = ours()
    loader = RingLoader(what, CPU, 1, FORK)
    (worker,) = ours() - before
    return loader, worker


def test_a_worker_that_was_killed_is_one_line() -> None:
    what = source(Numbers(20))
    loader, worker = worker_of(what)
    with pytest.raises(RuntimeError) as raised:  # wherever this process is then
        os.kill(worker.pid, signal.SIGKILL)
        while True:
            list(loader(what.share.batches()))
    # By the signal, if torch's handler could raise where it ran; else torch only finds the worker gone.
    told = dead_worker(raised.value)
    assert told and named(told, worker.pid) and (named(told, "SIGKILL") or named(told, "ended unexpectedly"))
    try:
        loader.close()
    except RuntimeError:  # it says so again
        loader.close()


def test_a_signal_to_every_process_of_a_job_ends_no_worker() -> None:
    what = source(Numbers(200))
    loader, worker = worker_of(what)
    expected = [frozen(batch) for batch in loader(what.share.batches())]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(worker.pid, number)
    assert [frozen(batch) for batch in loader(what.share.batches())] == expected
    worker.terminate()  # as torch does where a worker hangs
    worker.join()
    assert worker.exitcode == -signal.SIGKILL


def test_a_batch_in_use_is_not_overwritten() -> None:
    what = source(Numbers(400))
    batches = what.share.batches()
    expected = iter(read_all(RingLoader(what, CPU, 0, LoaderConfig()), batches))
    with closing(RingLoader(what, CPU, 2, LoaderConfig(prefetch=1, start_method="fork"))) as loader:
        before = next(running := loader(batches))
        for number, batch in enumerate(running, 1):
            if number % 10 == 0:
                torch.randn(200, 200) @ torch.randn(200, 200)
            assert frozen(before) == next(expected)
            before = batch


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_data_is_one_line(workers: int) -> None:
    what = source(Numbers(20, fail_at=7))
    with refused("sample 7:"):
        read_all(RingLoader(what, CPU, workers, FORK), what.share.batches())


def shared_memory() -> dict[str, int]:
    """Bytes of this process's maps of /dev/shm, by address."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split("-") for line in lines if "/dev/shm" in line]
    return {begin: int(end.split()[0], 16) - int(begin, 16) for begin, end, *_ in spans}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_batches_take_nothing_of_dev_shm() -> None:
    """Which may have 64 kB: only the semaphores of the workers' queues lie there."""
    gc.collect()  # those of loaders before
    wide = Numbers(16)
    wide.fields["big"] = Field((1 << 20,), np.dtype(np.uint8))  # samples of a MiB each
    what, before = source(wide), shared_memory()
    loader = RingLoader(what, CPU, 2, LoaderConfig(prefetch=4, start_method="fork"))
    batch = next(loader(what.share.batches()))
    sizes = [size for begin, size in shared_memory().items() if begin not in before]
    assert batch["big"].nbytes >= 2 << 20 and sum(sizes) <= 64 << 10
    loader.close()


def test_the_digits_are_those_of_scikit_learn() -> None:
    spec = importlib.util.find_spec("sklearn")  # to import it takes seconds
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    theirs, ours, rows = np.loadtxt(file, np.int64, delimiter=","), load_images(DataConfig(), 0), list[Any]()
    for part, count in ((ours.train, 1437), (ours.evaluation, 360)):
        arrays: Any = part.arrays
        pixels = (arrays["image"][..., 0] / 15).reshape(count, 64).round().astype(np.int64)
        rows += np.column_stack((pixels, arrays["label"])).tolist()
    assert sorted(rows) == sorted(theirs.tolist())


class Timed(Numbers):
    """Whose clocks go on only while it is read, 20 ms for each micro-batch."""

    wall = 0

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> None:
        super().read(samples, random, out)
        self.wall += 20_000_000


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_do_with_their_time_is_told(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Timed(40)
    clocks = {"perf_counter_ns": lambda: data.wall, "thread_time_ns": lambda: data.wall // 4}
    monkeypatch.setattr("trainer.data.workers.time", SimpleNamespace(**clocks))
    monkeypatch.setattr("trainer.data.workers.queued_ns", lambda: data.wall * 3 // 20)
    loader = RingLoader(source(data), CPU, workers, FORK)
    for _ in loader(range(5)):
        pass
    figures = loader.take_work()
    assert loader.take_work() == {}
    loader.close()
    shares = {"cpu": 0.25, "starved": 0.15, "blocked": pytest.approx(0.6), "seconds_per_sample": 0.02 / 4}
    assert figures == {f"loader/{name}": value for name, value in {"workers": workers, **shares}.items()}


def _rank_with_a_worker(pipe: Any) -> None:
    """Starts a process as a loader does, says which, and waits to be killed."""
    multiprocessing.get_context("fork").Process(target=_worker, args=(os.getpid(), pipe)).start()
    signal.pause()


def _worker(parent: int, pipe: Any) -> None:
    begin_worker(parent, 0)
    pipe.send([os.getpid()])
    signal.pause()


def _rank_with_a_loader(pipe: Any) -> None:
    server_here: Any = forkserver.ensure_running
    server_here.__self__.__init__()  # one of its own, not that of the process before the fork
    what = source(Numbers(20))
    batches = RingLoader(what, CPU, 1, LoaderConfig(start_method="forkserver"))(what.share.batches())
    next(batches)
    named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes.children(os.getpid())}
    server = next(pid for pid, line in named.items() if b"forkserver" in line)
    pipe.send([server, *processes.children(server)])
    signal.pause()


def gone_with(rank_of: Callable[[Any], None]) -> list[int]:
    """Processes that a rank started, which are gone soon after it was killed."""
    here, there = multiprocessing.Pipe()
    rank = multiprocessing.get_context("fork").Process(target=rank_of, args=(there,))
    rank.start()
    there.close()
    pids: list[int] = here.recv()
    rank.kill()
    until_gone(*pids)
    return pids


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends children with their parent")
def test_a_worker_ends_with_its_rank() -> None:
    assert len(gone_with(_rank_with_a_worker)) == 1
    # One whose parent was gone before it could say so ends by itself.
    late = multiprocessing.get_context("fork").Process(target=begin_worker, args=(-1, 0))
    late.start()
    late.join(300)
    assert late.exitcode == -signal.SIGKILL


@pytest.mark.xdist_group("forkserver")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_of_a_forkserver_ends_with_its_rank() -> None:
    assert len(gone_with(_rank_with_a_loader)) > 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_the_resource_workers_lack_is_named(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = mock.Mock(side_effect=OSError(number, os.strerror(number)))
    monkeypatch.setattr("multiprocessing.context.BaseContext.Queue", failing)
    with refused("data.workers=2", "ulimit -n" if number == errno.EMFILE else "/dev/shm data.workers=0"):
        RingLoader(source(Numbers(20)), CPU, 2, FORK)


def test_a_batch_gives_its_fields_by_name_and_counts_samples() -> None:
    one = Batch({"x": torch.arange(6.0).view(3, 2), "label": torch.arange(3)}, torch.ones(3), None, 6, 2)
    assert one["x"] is one.fields["x"] and "label" in one and "y" not in one and 0 not in one
    assert len(one) == 3
    assert [*one.keys()] == ["x", "label"] and dict(**one)["label"].tolist() == [0, 1, 2]
    assert (one.num_items, one.longest) == (6, 2)
    with pytest.raises(KeyError, match=r"y.*'x', 'label'"):
        one["y"]
    with pytest.raises(TypeError):  # it would give names
        _, _ = one  # type: ignore[misc]

    def call(given: Batch) -> torch.Tensor:
        return given["x"].sum() * len(given) + given.fields["x"].sum()

    assert torch.compile(call, backend="eager", fullgraph=True)(one).item() == 60
