"""The figures of `trainer bench scale`, from a run's own rows and from this machine."""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer import checkpoint
from trainer.bench.conditions import conditions
from trainer.bench.scale.figures import Job, read_link
from trainer.checkpoint import store, strict_json
from trainer.checkpoint.background import stage
from trainer.config import read_recipe, validated
from trainer.errors import EXIT_DONE, BadInputError
from trainer.limits import read_limits, threads_per_rank
from trainer.parallel import World, _silenced_stdout
from trainer.recipe import Recipe
from trainer.run import assemble, device_kind, make_task
from trainer.threads import wait_passively

_ASKING, _TIMES = 4, 1000  # clients of a store, and how often each asks
_ROUNDS = 5
_LLAMA = (
    "assumed: 419 unexpected interruptions in 54 days of 16,384 GPUs, 8 a node (The Llama 3 Herd of Models, "
    "2024, section 3.3.4): 54 x 24 x 2,048 / 419"
)

Found = dict[str, tuple[Any, str]]  # a figure and where it comes from


def print_figures(run: Path, comm: Path | None) -> int:
    """Measures and prints a file of figures.

    Args:
        run: Folder of a run of one rank, with some rows of figures and a checkpoint.
        comm: What `trainer bench comm --json` printed here.

    Raises:
        BadInputError: If one of them is missing, or isn't what is needed.
    """
    if comm is None:
        raise BadInputError(
            "--measure needs the links: trainer bench comm --json > comm.json, then --comm comm.json"
        )
    wait_passively()
    recipe = validated(Recipe, read_recipe(str(run / "config.yaml")), str(run / "config.yaml"))
    found = {
        **_of_rows(run, recipe),
        **_of_links(comm),
        **_of_buckets(recipe),
        **_of_checkpoint(run),
        **_of_store(),
        **_of_start(run),
        "detect_s": (
            recipe.parallel.hang_s or 300.0,
            "code: parallel.hang_s, the longest until a hang is named",
        ),
        "node_mtbf_hours": (6334.0, _LLAMA),
        "stored_bytes_per_sample": (0.0, "given: not known from a run: the size of a sample's file"),
    }
    job = as_job(f"{run.name}: {conditions()}", found)
    print(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, width=110), end="")
    return EXIT_DONE


def as_job(about: str, found: Mapping[str, tuple[Any, str]]) -> Job:
    """Figures with their sources, checked."""
    figures = {name: value for name, (value, _) in found.items()}
    sources = {name: source for name, (_, source) in found.items()}
    return validated(Job, {"about": about, "figures": figures, "sources": sources}, "what was measured")


def _of_rows(run: Path, recipe: Recipe) -> Found:
    """Seconds of the phases of a micro-batch, by the rows after the first; bytes of a row."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines()
        manifest = strict_json.parse((run / "manifest.json").read_bytes())
        rows = [row for row in map(strict_json.parse, lines) if row["kind"] == "train"]
        told = [row for row in rows if "time/wall" in row]
        spans = [(new["window"] - old["window"], new) for old, new in pairwise(told)]
        ranks, accumulation = int(manifest["world_size"]), int(manifest["accumulation"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{run}: no run whose rows can be read; give its folder") from error
    if len(spans) < 3 or ranks != 1:
        raise BadInputError(f"{run}: a run of one rank with at least 4 rows that tell the time is needed")

    def median(phase: str) -> float:
        return float(statistics.median(float(row[f"time/{phase}"]) / windows for windows, row in spans))

    written = sum(
        path.stat().st_size
        for path in (run / "metrics.jsonl", run / "trace.jsonl", *run.glob("tensorboard/*"))
        if path.is_file()
    )
    per_row = statistics.median(float(row["time/logging"]) for _, row in spans)
    worker = statistics.median(float(row.get("loader/seconds_per_sample", 0.0)) for _, row in spans)
    by = f"measured: rows of {run.name}, median of {len(spans)}"
    return {
        "samples_per_micro_batch": (recipe.data.global_batch // accumulation, by),
        "micro_batches_per_window": (accumulation, by),
        "forward_s": (median("forward") / accumulation, by),
        "backward_s": (median("backward") / accumulation, by),
        "update_s": (median("update"), by),
        "row_s": (per_row, by),
        "windows_per_row": (recipe.log.every, "code: log.every"),
        "row_bytes": (written / len(rows), f"measured: files of {run.name} over {len(rows)} rows"),
        "loader_cpu_s_per_sample": (worker, f"{by}: loader/seconds_per_sample"),
    }


def _of_links(comm: Path) -> Found:
    link = read_link(comm)
    ranks, alpha, speed = link.ranks, link.alpha_s, link.bytes_per_s
    if link.between_hosts:
        raise BadInputError(
            f"{comm}: of several hosts; begin with one of this host alone, then --comm this one"
        )
    by = f"measured: trainer bench comm --json, {ranks} ranks of one host"
    guess = "assumed: a network as fast as this host's own link; measure it on two hosts"
    return {
        "gpus_per_node": (ranks, by),
        "node_alpha_s": (alpha, by),
        "node_bytes_per_s": (speed, by),
        "network_alpha_s": (alpha, guess),
        "network_bytes_per_s": (speed, guess),
    }


def _of_buckets(recipe: Recipe) -> Found:
    """DDP's buckets and when they are ready, by a backward pass of one rank in a group of its own."""
    device = torch.device("cuda", 0) if device_kind(recipe) == "cuda" else torch.device("cpu")
    torch.set_num_threads(threads_per_rank(read_limits(), 1))
    length = {"epochs": 10**9, "max_windows": _ROUNDS + 2}
    recipe = recipe.model_copy(update=length)
    parts = assemble(recipe, make_task(recipe), World(0, 1, 0, device, None), workers=0)
    t = parts.training
    alone = dist.HashStore()  # type: ignore[attr-defined]
    with _silenced_stdout():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
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
            t.model, bucket_cap_mb=recipe.parallel.bucket_mb, gradient_as_bucket_view=True
        )
        replica.register_comm_hook(None, seen)
        replica.train()
        batches = parts.loader(t.share.batches())
        passes = []
        for _ in range(_ROUNDS + 2):  # the first two order the buckets and warm up
            with t.autocast:
                loss = t.task.loss(replica, next(batches))
            ready.clear()
            began = time.perf_counter()
            loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            whole = time.perf_counter() - began
            passes.append([(min(1.0, (at - began) / whole), size) for at, size in ready])
    finally:
        dist.destroy_process_group()
        parts.loader.close()
        parts.evaluation_loader.close()
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


def _of_checkpoint(run: Path) -> Found:
    """Copy, write and read of the run's newest checkpoint, by the functions that do it in a run."""
    try:
        found, _ = store.newest_good(run / checkpoint.FOLDER)
        if found is None:
            raise BadInputError(f"{run}: has no checkpoint; train it with --set checkpoint.every=… first")
        bytes_ = sum(path.stat().st_size for path in found.path.iterdir())
        copies, writes, reads = list[float](), list[float](), list[float]()
        tensors: Any = found.tensors
        if torch.cuda.is_available():
            tensors = {
                file: {name: one.cuda() for name, one in group.items()} for file, group in tensors.items()
            }
        stage(tensors)
        with tempfile.TemporaryDirectory(dir=run) as folder:
            for number in range(3):
                began = time.perf_counter()
                staged = stage(tensors)
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
        "read_bytes_per_s": (
            bytes_ / statistics.median(reads),
            f"{by}, newest_good() with its hash, of 3",
        ),
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


def _of_store() -> Found:
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
        "store_request_s": (
            seconds,
            f"measured: {_ASKING} clients of a TCPStore here, {_TIMES} each",
        ),
        "gloo_groups": (1 if torch.cuda.is_available() else 2, "code: trainer/parallel.py; one with NCCL"),
    }


def _of_start(run: Path) -> Found:
    """Seconds from the command to the first row, of a run that is this one's recipe and one window."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "run" / "metrics.jsonl"
        settings = ("max_windows=1", "log.every=1", "evaluate_every=0")
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
    return {"start_s": (seconds, "measured: a run of one window, one rank, from the command to its row")}
