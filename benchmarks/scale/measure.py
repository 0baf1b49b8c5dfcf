"""The figures of `python -m benchmarks scale`, from a run's own rows and from this machine."""

import statistics
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.conditions import conditions
from benchmarks.scale.figures import Job, read_link
from benchmarks.scale.probes import Found, of_buckets, of_checkpoint, of_start, of_store
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import read_recipe
from trainer.config.section import validated
from trainer.errors import EXIT_DONE, BadInputError
from trainer.host import strict_json
from trainer.host.startup import choose_waiting
from trainer.observe.rows import FILES
from trainer.runs.folder import read_rows

_LLAMA = (
    "assumed: 419 unexpected interruptions in 54 days of 16,384 GPUs, 8 a node (The Llama 3 Herd of Models, "
    "2024, section 3.3.4): 54 x 24 x 2,048 / 419"
)


def print_figures(run: Path, comm: Path | None) -> int:
    """Measures and prints a file of figures.

    Args:
        run: Folder of a run of one rank, with some rows of metrics and a checkpoint.
        comm: What `python -m benchmarks comm --json` printed here.

    Raises:
        BadInputError: If one of them is missing, or isn't what is needed.
    """
    if comm is None:
        raise BadInputError(
            "--measure needs the links: python -m benchmarks comm --json > comm.json, then --comm comm.json"
        )
    choose_waiting()
    recipe = validated(Recipe, read_recipe(str(run / "config.yaml")), str(run / "config.yaml"))
    found = {
        **_of_rows(run, recipe),
        **_of_links(comm),
        **of_buckets(recipe),
        **of_checkpoint(run),
        **of_store(),
        **of_start(run),
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
        manifest = strict_json.parse((run / "manifest.json").read_bytes())
        rows = list(read_rows(run, "train"))
        told = [row for row in rows if "time/wall" in row]
        spans = [(new["step"] - old["step"], new) for old, new in pairwise(told)]
        ranks, accumulation = int(manifest["world_size"]), int(manifest["gradient_accumulation_steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{run}: no run whose rows can be read; give its folder") from error
    if len(spans) < 3 or ranks != 1:
        raise BadInputError(f"{run}: a run of one rank with at least 4 rows that tell the time is needed")

    def median(phase: str) -> float:
        return float(statistics.median(float(row[f"time/{phase}"]) / steps for steps, row in spans))

    written = sum(
        path.stat().st_size
        for path in (run / FILES["train"], run / "checksums.jsonl", *run.glob("tensorboard/*"))
        if path.is_file()
    )
    per_row = statistics.median(float(row["time/logging"]) for _, row in spans)
    worker = statistics.median(float(row.get("loader/seconds_per_sample", 0.0)) for _, row in spans)
    by = f"measured: rows of {run.name}, median of {len(spans)}"
    return {
        "samples_per_micro_batch_size": (recipe.data.global_batch_size // accumulation, by),
        "micro_batches_per_step": (accumulation, by),
        "forward_s": (median("forward") / accumulation, by),
        "backward_s": (median("backward") / accumulation, by),
        "update_s": (median("update"), by),
        "row_s": (per_row, by),
        "steps_per_row": (recipe.log.every, "code: log.every"),
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
    by = f"measured: python -m benchmarks comm --json, {ranks} ranks of one host"
    guess = "assumed: a network as fast as this host's own link; measure it on two hosts"
    return {
        "gpus_per_node": (ranks, by),
        "node_alpha_s": (alpha, by),
        "node_bytes_per_s": (speed, by),
        "network_alpha_s": (alpha, guess),
        "network_bytes_per_s": (speed, guess),
    }
