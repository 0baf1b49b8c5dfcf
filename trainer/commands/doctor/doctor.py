"""Runs `trainer doctor`: reads the machine, runs every check, prints each fault with its remedy."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.doctor import gpu, machine, software
from trainer.commands.doctor.facts import CheckResult, Gpus, MachineFacts, RecipeNeeds, unavailable
from trainer.config.redact import redact_text
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.host import disks
from trainer.host.limits import Limits, read_limits
from trainer.host.reading import kind_of, within_seconds
from trainer.observe.text import without_controls

if TYPE_CHECKING:
    from trainer.config.recipe import Recipe


from rich.console import Console
from rich.text import Text

_RUNS = Path("runs")  # as in trainer.host.latest
_NVML_SECONDS = 4.0

CHECKS: tuple[tuple[str, Callable[[MachineFacts], CheckResult]], ...] = (
    *gpu.GPU_CHECKS,
    *software.SOFTWARE_CHECKS,
    *machine.MACHINE_CHECKS,
)


def doctor(options: argparse.Namespace) -> int:
    """Prints the findings; returns the exit code: 1 if any is bad.

    Raises:
        BadInputError: If the recipe, a setting or the folder is wrong.
    """
    began = time.monotonic()
    if options.set and options.recipe is None:
        raise BadInputError(f"--set {options.set[0]}: name a recipe, as in trainer doctor digits --set …")
    recipe = None
    if options.recipe is not None:  # importing pydantic takes as long as all the rest
        from trainer.config.recipe_file import provisional

        recipe, _ = provisional(options.recipe, options.set)
    if options.out is not None and kind_of(options.out) and kind_of(options.out) != "folder":
        raise BadInputError(f"--out {options.out}: is no folder; name the folder that the run is to be in")
    box = read_box(options.recipe, recipe, options.out or _RUNS)
    found = judge_facts(box)
    if options.json:
        print(json.dumps([_for_machines(name, one) for name, one in found.items()], indent=2))
    else:
        print_findings(found, time.monotonic() - began)
    return EXIT_FAILED if any(one.status == "bad" for one in found.values()) else EXIT_DONE


def judge_facts(box: MachineFacts) -> dict[str, CheckResult]:
    """Runs each check and returns the results by id; a check that raises is reported as unavailable."""
    found = {}
    for name, check in CHECKS:
        try:
            found[name] = check(box)
        except Exception as error:  # a failed check must not hide the others
            found[name] = unavailable(f"it can't be checked here ({type(error).__name__}: {error})")
    return found


def read_box(
    name: str | None,
    recipe: Recipe | None,
    out: Path,
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    nvml: Any = None,
) -> MachineFacts:
    """Reads all facts; takes about a second.

    Args:
        name: Name of the recipe, if one was given.
        recipe: The recipe; None without one.
        out: The run folder, or the folder of all runs.
        root: Folder that stands for "/".
        environ: Environment variables; by default this process's.
        nvml: The pynvml module, or a stand-in.
    """
    environ = os.environ if environ is None else environ
    limits = read_limits(root)
    silent = Gpus(problem=f"no answer within {_NVML_SECONDS:g} s", code=999, nodes=True)
    gpus = within_seconds(_NVML_SECONDS, lambda: gpu.read_gpus(nvml, root, environ), silent)
    caches = disks.cache_folders(environ)
    if recipe and recipe.data.cache:
        caches["data.cache"] = recipe.data.cache
    if name is None or recipe is None:
        needs = RecipeNeeds(ranks=max(1, len(gpus.cards)))
    else:
        needs = make_needs(name, recipe, limits, gpus)
    return MachineFacts(
        environ=environ,
        limits=limits,
        gpus=gpus,
        system=machine.read_system(root),
        run=disks.read_folder(out, root),
        caches={name: disks.read_folder(path, root) for name, path in caches.items()},
        data=disks.read_data(str(recipe.data.path) if recipe and recipe.data.path else None, root),
        software=software.read_software(environ=environ),
        interfaces=machine.read_interfaces(root),
        needs=needs,
    )


def make_needs(name: str, recipe: Recipe, limits: Limits, gpus: Gpus) -> RecipeNeeds:
    """Computes the requirements of a run on this machine.

    Args:
        name: Name of the recipe.
        recipe: The recipe.
        limits: Limits of the container.
        gpus: The GPUs: one rank each.
    """
    from trainer.config.formats import FORMATS
    from trainer.data.workers import Sizes, by_rule, bytes_needed

    ranks = max(1, len(gpus.cards)) if recipe.device != "cpu" else 1
    data = recipe.data
    if not FORMATS[data.name].workers:
        return RecipeNeeds(recipe=name, ranks=ranks)
    sample = 3 * data.image_size**2  # uint8, as it lies in the ring
    sizes = Sizes(
        sample,
        sample * data.micro_batch_size,
        sample * data.eval_batch_size,
        evaluation_sets=1 + len(recipe.evaluation.sets),
        workers=data.workers,
    )
    chosen = by_rule(data.workers, data.prefetch, sizes, limits, ranks)
    return RecipeNeeds(name, chosen.workers, ranks * bytes_needed(chosen, sizes), ranks)


def _for_machines(name: str, found: CheckResult) -> dict[str, str]:
    texts = {"finding": found.finding, "cause": found.cause, "remedy": found.remedy}
    return {"id": name, "status": found.status, **{key: redact_text(text) for key, text in texts.items()}}


_COLORS = {"bad": "red", "warn": "yellow"}


def print_findings(found: Mapping[str, CheckResult], seconds: float) -> None:
    """Prints each problem with its remedy, then the number of checks that passed."""
    console = Console()
    for name, one in sorted(found.items(), key=lambda item: item[1].status != "bad"):
        if one.status in _COLORS:
            lines = (f"{one.status:<5} {name}: {one.finding}", f"cause: {one.cause}", one.remedy)
            first, *more = (without_controls(redact_text(line).replace("\n", " ")) for line in lines)
            # A remedy is one line, however long: it is copied.
            console.print(Text(first, _COLORS[one.status]), soft_wrap=True)
            for line in more:
                console.print(Text(f"      {line}"), soft_wrap=True)
    print(found_summary(found, seconds))


def found_summary(found: Mapping[str, CheckResult], seconds: float) -> str:
    """Says how many checks passed, and which weren't available."""
    counts = {
        status: [name for name, one in found.items() if one.status == status]
        for status in ("ok", "bad", "warn", "not available")
    }
    counted = [f"{len(counts['ok'])} checks fine"]
    counted += [f"{len(counts['bad'])} bad"] if counts["bad"] else []
    counted += [f"{len(counts['warn'])} to know"] if counts["warn"] else []
    if absent := counts["not available"]:
        counted.append(f"{len(absent)} not available here ({', '.join(absent)})")
    return f"{', '.join(counted)}; {seconds:.1f} s"
