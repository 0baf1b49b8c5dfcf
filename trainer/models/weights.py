"""Loading of initial weights: safetensors only; every difference from the model is named."""

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from trainer.config.data import at_home
from trainer.distributed.overlap import sharing
from trainer.errors import BadInputError
from trainer.models.hf_files import CONFIG, weight_files
from trainer.models.names import matching

_PICKLED = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".tar")
_SHOWN = 5
_COMPILED = "_orig_mod."  # prefix of torch.compile
# Lightning's and timm's checkpoints are dicts around the state_dict.
_CONVERT = (
    "import torch, safetensors.torch as s; "
    "d = torch.load({given!r}, map_location='cpu', weights_only=True); "
    "d = next((d[k] for k in ('state_dict', 'model_state_dict', 'model') if isinstance(d.get(k), dict)), d); "
    "d = {{n: t.clone().contiguous() for n, t in d.items() if isinstance(t, torch.Tensor)}}; "
    "s.save_file(d, {made!r})"
)


def load_initial(model: nn.Module, file: Path, reinit: Sequence[str] | None) -> str:
    """Copies weights from a file into a model, in place; for a model on the meta device only checks them.

    Args:
        model: The model; weights are converted to its dtypes and memory format.
        file: A safetensors file with the names of the model's state_dict, with or without a common prefix;
            or the folder of a model of transformers.
        reinit: Patterns of names that keep their initialization. None: all must be in the file.

    Returns:
        A line for the user: the number of tensors, and their prefix.

    Raises:
        BadInputError: If the file isn't safetensors, or names or shapes differ where `reinit` doesn't allow.
    """
    files = weight_files(file) if (file / CONFIG).is_file() else (regular(file),)
    state = model.state_dict(keep_vars=True)
    try:
        with ExitStack() as stack:
            each = [stack.enter_context(safe_open(one, framework="pt")) for one in files]
            held = [(name, one) for one in each for name in one.keys()]  # noqa: SIM118  (no mapping)
            at = dict(held)
            if twice := [name for name, count in Counter(name for name, _ in held).items() if count > 1]:
                raise BadInputError(
                    f"model.pretrained: {file}: two of its files hold {_shown(twice)}; fetch the model again"
                )
            own = getattr(model, "named_in_files", None)
            if own is None:
                given, note = _unwrapped(list(at), state, file)
            else:
                given, note = own(list(at), lambda name: at[name].get_tensor(name), file)
            slices = {name: at[stored].get_slice(stored) for name, stored in given.items()}
            shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}
            modules = [name for name, _ in model.named_modules() if name]
            matching([*state, *shapes, *modules], reinit or (), "model.reinit")
            # "fc" matches all of that module, as "fc.*" does.
            left_out = None if reinit is None else [*reinit, *(f"{pattern}.*" for pattern in reinit)]
            names = _agreed(state, shapes, file, left_out)
            for name in names:
                _check_format(name, state[name], slices[name].get_dtype(), file)
            trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            for name in names if next(model.parameters()).device.type != "meta" else ():
                tensor = at[given[name]].get_tensor(given[name])
                with torch.no_grad():
                    state[name].copy_(_sound(tensor.to(state[name].dtype), name, file, name in trained))
            for group in sharing({name: state[name] for name in names}):
                _check_agreement(
                    file, group, [at[given[name]].get_tensor(given[name]) for name in group], state
                )
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInputError(f"model.pretrained: can't read {file} ({reason}); give another file") from error
    except SafetensorError as error:
        raise BadInputError(f"model.pretrained: {file} is not a safetensors file. {_remedy(file)}") from error
    return f"{len(names)} tensors{note}"


def _unwrapped(names: Sequence[str], wanted: Collection[str], file: Path) -> tuple[dict[str, str], str]:
    """Returns the names in a file by the model's names, and a note for the user if they differ.

    Wrappers add a prefix: Lightning's module `model.`, DDP `module.`, torch.compile `_orig_mod.` anywhere.
    Tensors without the prefix, such as those of losses and metrics, are left out.

    Raises:
        BadInputError: If the file holds the model, or a tensor, with two prefixes.
    """
    given = {name.replace(_COMPILED, ""): name for name in names}
    if len(given) < len(names):
        raise BadInputError(
            f"model.pretrained: {file} holds tensors with and without {_COMPILED!r}; save one of the two "
            "alone"
        )
    found = Counter[str]()
    for name in given:
        parts = name.split(".")
        for depth in range(len(parts)):
            if ".".join(parts[depth:]) in wanted:
                found["".join(f"{part}." for part in parts[:depth])] += 1
    (prefix, most), *others = found.most_common() or [("", 0)]
    if found[""] == most or 2 * most < len(wanted):
        return given, f", without {_COMPILED}" if given.keys() != {*names} else ""
    if rivals := [other for other, count in others if count == most]:
        raise BadInputError(
            f"model.pretrained: {file} holds the model behind {prefix!r} and behind {rivals[0]!r}; save one "
            "of the two alone"
        )
    given = {name.removeprefix(prefix): stored for name, stored in given.items() if name.startswith(prefix)}
    rest = len(names) - len(given)
    return given, f" behind {prefix!r}" + (f"; {rest} others of the file are left out" if rest else "")


def _check_agreement(
    file: Path, names: Sequence[str], given: Sequence[torch.Tensor], state: dict[str, torch.Tensor]
) -> None:
    """Rejects different values for tensors that share memory in the model."""
    for name, tensor in zip(names, given, strict=True):
        held = state[name].detach()
        if not held.is_meta and not torch.equal(held, tensor.to(held)):
            raise BadInputError(
                f"model.pretrained: {file}: {' and '.join(names[:2])} share memory in the model, and the "
                "file has other values for each; give a file of such a model, or clone one of them"
            )


def _agreed(
    state: dict[str, Any], shapes: dict[str, tuple[int, ...]], file: Path, reinit: Sequence[str] | None
) -> list[str]:
    def kept(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in reinit or ())

    wanted = {name: tuple(tensor.shape) for name, tensor in state.items() if kept(name)}
    # BatchNorm's counters: old files lack them, and the values don't matter.
    missing = [n for n in wanted if n not in shapes and not n.endswith(".num_batches_tracked")]
    counters = ".num_batches_tracked"
    unexpected = [n for n in shapes if n not in state and kept(n) and not n.endswith(counters)]
    differing = [n for n in wanted if n in shapes and shapes[n] != wanted[n]]
    if not wanted:
        raise BadInputError(f"model.reinit: nothing is left to take from {file}; leave out both")
    shapes_differ = [f"{name} {list(shapes[name])} for {list(wanted[name])}" for name in differing]
    problems = [
        f"{len(names)} {what} ({_shown(names)})"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes_differ),
        )
        if names
    ]
    if problems:
        patterns = _outermost({*missing, *unexpected, *differing}, {*wanted, *unexpected})
        quoted = ", ".join(f'"{pattern}"' for pattern in patterns)
        remedy = (
            f"Choose the same model, or keep the initialization of these with 'model.reinit=[{quoted}]'"
            if reinit is not None
            and len(patterns) <= _SHOWN
            and len(missing) + len(differing) < len(wanted) / 2
            else "It holds another model: choose the one that it was saved from"
        )
        raise BadInputError(f"model.pretrained: {file} and the model differ: {'; '.join(problems)}. {remedy}")
    return [name for name in wanted if name in shapes]


def _outermost(odd: set[str], names: set[str]) -> list[str]:
    """Returns the outermost modules whose tensors are all in `odd`, and the other tensors in `odd`."""
    found = set()
    for name in odd:
        parts = name.split(".")
        above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        inside = (module for module in above if {n for n in names if n.startswith(f"{module}.")} <= odd)
        found.add(next(inside, name))
    return sorted(found)


def _shown(names: list[str]) -> str:
    # A file's names may hold escape sequences, which must not reach the terminal.
    listed = ", ".join(name if name.isprintable() else repr(name) for name in names[:_SHOWN])
    return listed + (", …" if len(names) > _SHOWN else "")


def _check_format(name: str, target: torch.Tensor, given: str, file: Path) -> None:
    floating = ("F64", "F32", "F16", "BF16")
    if target.is_floating_point() != (given in floating) or (given == "BOOL") != (target.dtype == torch.bool):
        raise BadInputError(
            f"model.pretrained: {file}: {name} is {given}, but the model's is {target.dtype}; "
            "save it in a floating format of 16 bits or more"
        )


def _sound(tensor: torch.Tensor, name: str, file: Path, is_parameter: bool) -> torch.Tensor:
    if bool(tensor.isnan().any()) or (is_parameter and bool(tensor.isinf().any())):  # a mask has infinities
        raise BadInputError(
            f"model.pretrained: {file}: {name} isn't finite in {tensor.dtype}; take weights that didn't "
            "diverge"
        )
    return tensor


def regular(file: Path) -> Path:
    """Returns the path of a regular file; a missing file passes.

    Raises:
        BadInputError: If it is a folder, or a special file such as a pipe.
    """
    file = at_home(file, "model.pretrained")
    if file.is_dir():
        inside = file / "model.safetensors"
        raise BadInputError(f"model.pretrained: {file} is a folder; give a file in it, such as {inside}")
    if file.exists() and not file.is_file():
        raise BadInputError(f"model.pretrained: {file} isn't a regular file; give a .safetensors file")
    return file


def _remedy(file: Path) -> str:
    if file.suffix in _PICKLED:
        return (
            "A pickle can run code when it is read, so it never is here. If you trust it, convert it once "
            f'elsewhere: python -c "{_CONVERT.format(given=file.name, made=f"{file.stem}.safetensors")}"'
        )
    return "Save the state_dict with safetensors.torch.save_file"
