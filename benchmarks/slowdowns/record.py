"""Record of a run: the figures that its verdict depends on, so that it can be judged again at once."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.slowdowns.run import Ending
from trainer.config.data import is_url
from trainer.config.training import CheckpointConfig, EvaluationConfig
from trainer.observe.diagnosis import Facts, Verdict, diagnose, fewer_checkpoints, fewer_evaluations, merge

FOLDER = Path(__file__).parents[2] / "tests" / "verdicts"
_NOT_PLACES = ("epoch", "lr", "updates", "loss", "grad_norm", "kind", "step", "loss_scale")


class Record(NamedTuple):
    """A recorded run.

    Attributes:
        name: Of the case.
        cause: What slowed it.
        also: What names the same thing rightly.
        figures: What `diagnose` takes.
        facts: What the figures don't say.
        said: The run's own last verdict: cause, share and text.
        where: "cpu": a real run here; "gpu": figures of a machine with a GPU, see `gpu.py`.
        run: What else is known of a real run: samples_per_s, seconds, others (CPUs' worth of time that other
            processes of the machine used), attempt.
    """

    name: str
    cause: str
    also: tuple[str, ...]
    figures: Mapping[str, float | int | str]
    facts: Facts
    said: Mapping[str, Any]
    where: str = "cpu"
    run: Mapping[str, float] = MappingProxyType({})

    def judged_again(self) -> Verdict:
        """The verdict of the rules as they are now."""
        return diagnose(self.figures, self.facts)

    def named(self, cause: str) -> bool:
        """Whether that is what slowed it."""
        return cause == self.cause or cause in self.also


def record_of(
    name: str,
    cause: str,
    also: tuple[str, ...],
    ending: Ending,
    folder: Path,
    run: Mapping[str, float],
) -> Record:
    """Returns the record of a run that ended well; of `run` see `Record`."""
    manifest = json.loads((folder / "manifest.json").read_text())
    rows = [row for row in ending.rows if row.get("kind") == "train" and "samples_per_s" in row]
    figures = merge([{key: value for key, value in row.items() if value is not None} for row in rows])
    # With the time after the last row.
    end = [row for row in ending.rows if row.get("kind") == "end"][-1:]
    figures |= {key: value for row in end for key, value in row.items() if key.startswith("time/")}
    kept = {key: _short(value) for key, value in figures.items() if key not in _NOT_PLACES}
    data, ranks = manifest["config"]["data"], manifest["world_size"]
    waits = re.search(r"in each step at (\S+?):? ", ending.verdict.get("text", "").replace(": leave", " "))
    facts = Facts(
        on_gpu=manifest["device"]["kind"] != "cpu",
        ranks=ranks,
        local_ranks=ranks,
        threads=manifest["threads"],
        cpus=float(kept.get("cpu/limit", 0) or 0),
        step_samples=data["global_batch_size"],
        micro_batch_size=data["micro_batch_size"],
        remote=is_url(str(data["path"])),
        decodes=data["name"] in ("folder", "table", "shards", "pack"),
        waits=waits[1] if waits else "",
        fewer_checkpoints=fewer_checkpoints(
            CheckpointConfig(**manifest["config"]["checkpoint"]),
            EvaluationConfig(**manifest["config"]["evaluation"]),
        ),
        fewer_evaluations=fewer_evaluations(EvaluationConfig(**manifest["config"]["evaluation"])),
    )
    said = {key: _short(ending.verdict.get(key, "")) for key in ("cause", "share", "text")}
    return Record(name, cause, also, kept, facts, said, "cpu", {k: _short(v) for k, v in run.items()})


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def write(record: Record, folder: Path = FOLDER) -> None:
    """Writes `<name>.json`."""
    folder.mkdir(exist_ok=True)
    values = {**record._asdict(), "facts": dataclasses.asdict(record.facts), "run": dict(record.run)}
    (folder / f"{record.name}.json").write_text(json.dumps(values, indent=1) + "\n")


def read_all(folder: Path = FOLDER) -> Iterator[Record]:
    """All that were recorded, by name."""
    for path in sorted(folder.glob("*.json")):
        values = json.loads(path.read_text())
        values["facts"], values["also"] = Facts(**values["facts"]), tuple(values["also"])
        yield Record(**values)
