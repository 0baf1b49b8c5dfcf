"""Probes of this machine: DDP's buckets, the ways of a checkpoint, the ranks' store, a start."""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer import checkpoint
from trainer.checkpoint import store
from trainer.checkpoint.background import make_room, stage
from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World, hold_gloo, silenced
from trainer.errors import BadInputError
from trainer.host.limits import read_limits, threads_per_rank
from trainer.train.components.run import build
from trainer.train.components.task import device_kind, make_task

_ASKING, _TIMES = 4, 1000  # clients of a store, and how often each asks
_ROUNDS = 5

Found = dict[str, tuple[Any, str]]  # figures, each with where it comes from


def of_buckets(recipe: Recipe) -> Found:
    """DDP's buckets and when they are ready, by a backward pass of one rank in a group of its own."""
    device = torch.device("cuda", 0) if device_kind(recipe) == "cuda" else torch.device("cpu")
    torch.set_num_threads(threads_per_rank(read_limits(), 1))
    length = {"epochs": 10**9, "max_steps": _ROUNDS + 2}
    recipe = recipe.model_copy(update=length)
    run = build(recipe, make_task(recipe), World(0, 1, 0, device, None), workers=0)
    alone = dist.HashStore()  # type: ignore[attr-defined]
    with silenced(sys.stdout):
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    if backend == "gloo":
        hold_gloo(dist.group.WORLD)
    ready = list[tuple[float, int]]()

    def seen(
        _: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ready.append((time.perf_counter(), bucket.buffer().nbytes))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    try:
        replica = DistributedDataParallel(
            run.state.model, bucket_cap_mb=recipe.parallel.bucket_mb, gradient_as_bucket_view=True
        )
        replica.register_comm_hook(None, seen)
        replica.train()
        batches = run.loader(run.share.batches())
        passes = []
        for _ in range(_ROUNDS + 2):  # the first two order the buckets and warm up
            with run.precision.autocast:
                loss = run.task.loss(replica, next(batches))
            ready.clear()
            began = time.perf_counter()
            loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            whole = time.perf_counter() - began
            passes.append([(min(1.0, (at - began) / whole), size) for at, size in ready])
    finally:
        dist.destroy_process_group()
        run.close()
    kept = passes[2:]
    shares = [statistics.median(one[n][0] for one in kept) for n in range(len(kept[0]))]
    by = f"measured: DDP's hook in {_ROUNDS} backward passes of one rank"
    return {
        "bucket_bytes": (
            [size for _, size in kept[0]],
            f"{by}, parallel.bucket_mb={recipe.parallel.bucket_mb}",
        ),
        "bucket_ready_share": ([round(share, 4) for share in shares], f"{by}, median"),
    }


def of_checkpoint(run: Path) -> Found:
    """Copy, write and read of the run's newest checkpoint, by the functions that do it in a run."""
    try:
        found, _ = store.newest_good(run / checkpoint.CHECKPOINTS)
        if found is None:
            raise BadInputError(f"{run}: has no checkpoint; train it with --set checkpoint.every=… first")
        bytes_ = sum(path.stat().st_size for path in found.path.iterdir())
        copies, writes, reads = list[float](), list[float](), list[float]()
        tensors: Any = found.tensors
        if torch.cuda.is_available():
            tensors = {
                file: {name: one.cuda() for name, one in group.items()} for file, group in tensors.items()
            }
        room = make_room(tensors)
        stage(tensors, room)
        with tempfile.TemporaryDirectory(dir=run) as folder:
            for number in range(3):
                began = time.perf_counter()
                staged = stage(tensors, room)
                copies.append(time.perf_counter() - began)
                began = time.perf_counter()
                path = store.write(Path(folder), number, staged, {})
                writes.append(time.perf_counter() - began)
                _forget(path)
                began = time.perf_counter()
                store.newest_good(Path(folder))
                reads.append(time.perf_counter() - began)
    except OSError as error:
        raise BadInputError(f"{run}: no checkpoint can be written there ({error.strerror})") from error
    by = f"measured: {run.name}, {found.path.name}"
    return {
        "checkpoint_bytes": (bytes_, by),
        "host_copy_bytes_per_s": (bytes_ / statistics.median(copies), f"{by}, stage(), median of 3"),
        "disk_bytes_per_s": (
            bytes_ / statistics.median(writes),
            f"{by}, write() with its hash and sync, of 3",
        ),
        "read_bytes_per_s": (bytes_ / statistics.median(reads), f"{by}, newest_good() with its hash, of 3"),
    }


def _forget(folder: Path) -> None:
    """Takes the files of a folder out of the page cache, where that can be asked for."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def of_store() -> Found:
    """Seconds of a request to torch's store from several clients at once, on this host."""
    make = dist.TCPStore  # type: ignore[attr-defined]
    served = make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    served.set("address", "x" * 100)

    def ask() -> None:
        client = make("127.0.0.1", served.port, is_master=False, timeout=timedelta(seconds=60))
        for _ in range(_TIMES):
            client.get("address")

    clients = [threading.Thread(target=ask) for _ in range(_ASKING)]
    began = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    seconds = (time.perf_counter() - began) / (_ASKING * _TIMES)
    return {
        "store_request_s": (seconds, f"measured: {_ASKING} clients of a TCPStore here, {_TIMES} each"),
        "gloo_groups": (
            1 if torch.cuda.is_available() else 2,
            "code: trainer/distributed/parallel.py; one with NCCL",
        ),
    }


def of_start(run: Path) -> Found:
    """Seconds from the command to the first row, of a run that is this one's recipe and one step."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "run" / "metrics.jsonl"
        settings = ("max_steps=1", "log.every=1", "evaluation.every=end")
        words = [word for setting in settings for word in ("--set", setting)]
        command = [
            sys.executable,
            "-m",
            "trainer",
            "train",
            str(run / "config.yaml"),
            "--out",
            str(rows.parent),
        ]
        began = time.perf_counter()
        with subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not (rows.exists() and rows.stat().st_size):
                time.sleep(0.02)
            seconds = time.perf_counter() - began
        if process.returncode:
            raise BadInputError(f"{run}: its recipe couldn't be started again, see above")
    return {"start_s": (seconds, "measured: a run of one step, one rank, from the command to its row")}
