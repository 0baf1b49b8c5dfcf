"""`trainer export RUN`: writes a run's model in another format, and checks that it computes the same."""

import argparse
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.checkpoint.folder import Damaged, Unreadable, read_weights
from trainer.commands.export import hf
from trainer.commands.export.check import BATCHES, NotTheSame, in_fresh_process
from trainer.data.batch import Batch
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError, writing
from trainer.host import strict_json
from trainer.host.files import check_writable, oddity, read_inside
from trainer.host.here import path_shown
from trainer.launch.signals import unwound
from trainer.models.export_formats import (
    INSTALL_ONNX,
    LIMITS,
    FromPixels,
    InLowPrecision,
    ModelTensors,
    input_names,
    leaves,
    missing_packages,
    output_names,
    quiet,
    relative_error,
    write_onnx,
    write_torch_export,
)
from trainer.models.head_loss import IGNORED
from trainer.observe.console import tell, warn
from trainer.observe.text import plain
from trainer.runs.folder import write_json
from trainer.train.model_of_run import (
    OpenedRun,
    inputs_of,
    open_run,
    read_samples,
    some_samples,
)
from trainer.train.provenance import file_hash
from trainer.train.recording import save_weights

_ABOUT = "model.json"
_REMEDY = "give another --out"
_WEIGHTS = ("safetensors", *hf.LIBRARIES)  # formats of weights alone, with the names of a model
_EXAMPLES = 3  # samples that are traced with; any number but one, which torch takes for a constant


def write_safetensors(model: nn.Module, _: ModelTensors, folder: Path) -> Path:
    """Writes the weights alone, under the names of the trainer's model."""
    file = folder / "model.safetensors"
    save_weights(model, file)
    return file


WRITERS: dict[str, Callable[[nn.Module, ModelTensors, Path], Path]] = {
    "torch-export": write_torch_export,
    "onnx": write_onnx,
    "safetensors": write_safetensors,
}


class _Subject(NamedTuple):
    """The model to export, with inputs and expected outputs for the check.

    Attributes:
        model: The model to write.
        inputs: Inputs of each batch of the check.
        wanted: What the file is to compute of these: the outputs of the trained model, or of the same model
            with weights rounded to bfloat16. Weights alone are computed with in float32, here and where they
            are read back, so that no rounding in between hides a fault, or is taken for one.
        places: Places of each batch that a loss counts, bool (n, length); None: all outputs are compared.
        tensors: What the file is to hold, bit for bit, by its names; None where it can't be read back so:
            ONNX folds weights into others.
        rounding: Relative error of `wanted` to the trained model's outputs; it has no limit, since it is the
            model's own and grows with its depth.
    """

    model: nn.Module
    inputs: Sequence[ModelTensors]
    wanted: list[list[torch.Tensor]]
    places: Sequence[torch.Tensor | None]
    tensors: Mapping[str, torch.Tensor] | None
    rounding: float


@unwound()
def export(options: argparse.Namespace) -> int:
    """Runs `trainer export`; returns the exit code: 1 if the file computes something else.

    Raises:
        BadInputError: If the run can't be opened, the target is taken, or what the format needs isn't here.
    """
    name: str = options.to
    _check_request(options)
    target = _target(options)
    with writing(str(target), _REMEDY):  # before the model is built and compared
        check_writable(next(folder for folder in target.parents if os.path.lexists(folder)))
    run = open_run(options.folder, options.set)
    subject = _subject(run, options)
    try:
        with _published(target) as beside:
            file, error = _write(name, subject, run, beside, options)
            write_json(beside / _ABOUT, export_facts(file, error, subject, run, options))
    except NotTheSame as problem:
        line = " ".join(f"{run.folder} as {name}: {problem}; nothing was written".split())
        warn(plain(line, 1000))
        return EXIT_FAILED
    _tell(target, file.name, error, subject, run, options)
    return EXIT_DONE


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """A context with a new folder beside a target, whose place it takes at the end; gone on an error."""
    beside = target.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(4)}")  # no longer than a name may be
    try:
        with writing(str(target), _REMEDY):
            beside.mkdir(parents=True)
            yield beside
            _publish(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _check_request(options: argparse.Namespace) -> None:
    if options.to == "onnx" and options.dtype == "bf16":
        raise BadInputError(
            "--to onnx --dtype bf16: ONNX Runtime has no bfloat16 convolution on a CPU, so nothing could "
            "be checked; use fp32, and convert it where it will run"
        )
    if options.to in _WEIGHTS and options.with_normalization:
        raise BadInputError(f"--with-normalization: {options.to} holds weights only; use another format")
    if options.to == "onnx" and (missing := missing_packages("onnx", "onnxscript", "onnxruntime")):
        raise BadInputError(f"--to onnx needs {missing}, which isn't installed: {INSTALL_ONNX}")


def _target(options: argparse.Namespace) -> Path:
    """Returns the folder to write, which must be free or an export that may be replaced."""
    default: Path = options.folder / "export" / f"{options.to}-{options.dtype}"
    if options.out is None:
        for folder in (default.parent, default):
            if odd := oddity(folder, folder=True):
                raise BadInputError(f"{folder}: {odd}; say by --out where it is to be")
    target = Path(os.path.realpath(options.out or default))
    if not target.exists():
        if target.is_symlink():
            raise BadInputError(f"--out {target}: is a link that leads to itself; give another folder")
        return target
    if not target.is_dir() or (any(target.iterdir()) and not (target / _ABOUT).is_file()):
        raise BadInputError(f"--out {target}: is there already and no export; give another folder")
    if any(target.iterdir()) and (others := _others(target)):
        raise BadInputError(f"--out {target}: holds other things too ({others[0]}); give another folder")
    if not options.force and any(target.iterdir()):
        raise BadInputError(f"--out {target}: holds an export already; give another folder, or --force")
    return target


def _others(target: Path) -> list[str]:
    """Lists files in a folder that don't belong to an export."""
    try:
        stored = strict_json.parse(read_inside(target / _ABOUT, strict_json.LARGEST))
        ours = {_ABOUT, *(name.partition("/")[0] for name in stored["sha256"])}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return [_ABOUT]
    return sorted({path.name for path in target.iterdir()} - ours)


def _subject(run: OpenedRun, options: argparse.Namespace) -> _Subject:
    """Returns the model as it will be written, real samples, and the trained model's outputs for them."""
    dataset = run.task.evaluation_data
    batches = list[Batch]()
    samples = some_samples(dataset, sum(BATCHES))
    for size in BATCHES:
        batches.append(read_samples(dataset, samples[:size]))
        samples = samples[size:]
    reference: nn.Module = run.model
    inputs = [inputs_of(run, batch) for batch in batches]
    if options.with_normalization:
        reference, inputs = _from_pixels(run, reference), [(batch.fields["image"],) for batch in batches]
    places = [_places(run, batch) for batch in batches]
    only_weights = options.to in _WEIGHTS
    tensors = hf.tensors_to_write(options.to, run) if options.to in hf.LIBRARIES else run.model.state_dict()
    with torch.no_grad():
        trained = wanted = [leaves(reference(*values)) for values in inputs]
        model = reference
        if options.dtype == "bf16":
            tensors = {name: _low(tensor) for name, tensor in tensors.items()}
            if not only_weights:
                model = InLowPrecision(run.model.to(torch.bfloat16))
                model = _from_pixels(run, model) if options.with_normalization else model
            elif options.to == "peft":
                hf.add_rounding(run)
            else:  # but for buffers that no file holds, which the library computes anew in float32
                for tensor in run.model.state_dict().values():
                    tensor.copy_(_low(tensor))
            wanted = [leaves(model(*values)) for values in inputs]
            model = model.to(torch.bfloat16) if only_weights else model
    if options.to == "torch-export":  # under the wrappers' names, with what those hold
        prefix = "model." * (options.with_normalization + (options.dtype == "bf16"))
        own = {name: one for name, one in model.state_dict().items() if not name.startswith(prefix)}
        tensors = {**(own if prefix else {}), **{prefix + name: one for name, one in tensors.items()}}
    known = None if options.to == "onnx" else tensors
    rounding = _worst(trained, wanted, places)
    return _Subject(model.eval(), inputs, wanted, places, known, rounding)


def _low(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def _places(run: OpenedRun, batch: Batch) -> torch.Tensor | None:
    """Places of a text that a loss counts: at padding a model says anything, and nobody reads it."""
    if run.recipe.task != "language":
        return None
    _, targets, _ = run.task.given(batch)  # type: ignore[attr-defined]
    counts: torch.Tensor = targets != IGNORED
    return counts if counts.any() else None


def _worst(
    wanted: Sequence[ModelTensors], given: Sequence[ModelTensors], places: Sequence[torch.Tensor | None]
) -> float:
    """Returns the largest relative error of all batches, at places that count."""

    def counting(outputs: ModelTensors, which: torch.Tensor | None) -> ModelTensors:
        if which is None:
            return outputs
        return [one[which] if one.shape[:2] == which.shape else one for one in outputs]

    each = zip(wanted, given, places, strict=True)
    return max(relative_error(counting(one, which), counting(other, which)) for one, other, which in each)


def _from_pixels(run: OpenedRun, model: nn.Module) -> nn.Module:
    facts = run.task.describe()
    if run.recipe.task != "classification":
        raise BadInputError(f"--with-normalization: is for images to classes, not for task={run.recipe.task}")
    return FromPixels(model, facts["mean"], facts["std"], bool(facts.get("several")))


def _write(
    name: str,
    subject: _Subject,
    run: OpenedRun,
    folder: Path,
    options: argparse.Namespace,
) -> tuple[Path, float]:
    """Writes and checks; returns the file and its relative error."""
    example = tuple(value[:_EXAMPLES].clone() for value in subject.inputs[-1])
    tell(f"export: writing {name} ({options.dtype})")
    try:
        with torch.no_grad():
            if name in hf.LIBRARIES:
                file = hf.write_for_library(name, run, subject.model, folder)
            else:
                file = WRITERS[name](subject.model, example, folder)
    except (BadInputError, OSError):
        raise
    except Exception as error:  # the exporters raise whatever the model's code leads them to
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotTheSame(f"torch {torch.__version__} can't export this model ({first})") from error
    weights_of = [str(run.folder), *options.set] if name == "safetensors" else []
    tell("export: checking it in a fresh process")
    given = in_fresh_process(file, subject.inputs, weights_of)
    if subject.tensors is not None:
        _check_tensors(file, subject.tensors)
    error_of, limit = _worst(subject.wanted, given, subject.places), _limit(options)
    if not error_of <= limit:
        raise NotTheSame(
            f"its outputs differ from the model's in {options.dtype} by {error_of:.1e} of the largest, more "
            f"than {limit:g}"
        )
    return file, error_of


def _limit(options: argparse.Namespace) -> float:
    """Returns the largest relative error of outputs; weights alone are computed with in float32."""
    return LIMITS["fp32" if options.to in _WEIGHTS else options.dtype]


def _check_tensors(file: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """Checks that a file holds tensors bit for bit.

    Raises:
        NotTheSame: If it doesn't; names the first.
    """
    if file.suffix == ".pt2":
        with quiet():
            found = dict(torch.export.load(file).state_dict)
        wanted = {name: wanted[name] for name in wanted if name in found}  # tied ones have one name there
    else:
        try:
            found = read_weights(file)
        except (Damaged, Unreadable) as error:
            raise NotTheSame(f"the file can't be read back ({error})") from error
    odd = sorted(found.keys() ^ wanted.keys())
    odd += [name for name in wanted if name in found and not _same_bits(found[name], wanted[name])]
    if odd:
        raise NotTheSame(f"the file's tensor {odd[0]} isn't the trained model's")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    one, other = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def export_facts(
    file: Path, error: float, subject: _Subject, run: OpenedRun, options: argparse.Namespace
) -> dict[str, Any]:
    """Returns the description of the file for its users, as JSON."""
    inputs, outputs = subject.inputs[-1], subject.wanted[-1]
    files = sorted(path for path in file.parent.rglob("*") if path.is_file() and path.name != _ABOUT)
    return {
        "format": options.to,
        "file": file.name,
        "dtype": options.dtype,
        "inputs": _described(input_names(inputs), inputs),
        "outputs": _described(output_names(outputs), outputs),
        "normalization": "inside: uint8 (batch, height, width, channels) to probabilities"
        if options.with_normalization
        else "outside, see data",
        "data": run.task.describe(),
        "task": run.recipe.task,
        "run": run.folder.resolve().name,
        "config_hash": run.manifest.config_hash,
        "weights": run.weights,
        "versions": {"torch": torch.__version__, **(hf.versions() if options.to in hf.LIBRARIES else {})},
        **({"base": run.manifest.pretrained.model_dump()} if run.manifest.pretrained else {}),
        "sha256": {path.relative_to(file.parent).as_posix(): file_hash(path) for path in files},
        "checked": {
            "samples": sum(BATCHES),
            "batches": list(BATCHES),
            "relative_error": error,
            "limit": _limit(options),
            "rounding": subject.rounding,
        },
    }


def _described(names: Sequence[str], tensors: ModelTensors) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "shape": ["batch", *tensor.shape[1:]],
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        for name, tensor in zip(names, tensors, strict=True)
    ]


def _publish(beside: Path, target: Path) -> None:
    """Gives a finished folder its name; an older export is removed first."""
    if target.exists():
        gone = beside.with_name(f"{beside.name}.gone")
        target.rename(gone)
        try:
            beside.rename(target)
        except OSError:
            gone.rename(target)
            raise
        shutil.rmtree(gone, ignore_errors=True)
    else:
        beside.rename(target)


def _tell(
    target: Path, name: str, error: float, subject: _Subject, run: OpenedRun, options: argparse.Namespace
) -> None:
    file = target / name
    print(f"{path_shown(file)} ({file.stat().st_size / 1000:,.0f} kB), from {run.weights}")
    inputs = ", ".join(
        f"{one['name']} {one['dtype']} {tuple(one['shape'])}".replace("'", "")
        for one in _described(input_names(subject.inputs[-1]), subject.inputs[-1])
    )
    rounded = (
        f"  rounding    {options.dtype} moves the outputs by {subject.rounding:.1e} of the largest\n"
        if options.dtype == "bf16"
        else ""
    )
    print(
        f"  takes       {inputs}\n"
        f"  checked     in a fresh process on {sum(BATCHES)} samples in batches of "
        f"{', '.join(map(str, BATCHES))}: relative error {error:.1e} (limit {_limit(options):g})\n"
        f"{rounded}"
        f"  described   {path_shown(target / _ABOUT)}"
    )
