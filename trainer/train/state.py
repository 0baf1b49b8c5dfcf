"""Everything that a run carries from one step to the next, as named tensors; and back.

Position and randomness are arithmetic, so this is all there is: weights and buffers, the optimiser's state,
the average, the scaler, the count of updates, and the sum of losses since the last row of metrics.
"""

from collections.abc import Iterator, Mapping

import torch

from trainer.train.step import Training

Tensors = dict[str, dict[str, torch.Tensor]]

_ADAMW = ("step", "exp_avg", "exp_avg_sq")
_SCALER = ("_scale", "_growth_tracker")


def tensors_of(t: Training) -> Tensors:
    """The tensors of a run where they are, uncopied: `model`, `optimizer` and, if there is one, `ema`."""
    tensors = {"model": dict(t.model.state_dict()), "optimizer": dict(_optimizer_tensors(t))}
    if t.average is not None:
        t.average.catch_up()
        tensors["optimizer"]["ema/moved_at"] = t.average.moved_at
        tensors["ema"] = t.average.tensors
    return tensors


def load_tensors(t: Training, step: int, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Puts saved tensors into a run, in place, each with the strides and on the device of its target.

    Args:
        t: The run, as it was assembled.
        step: Steps done.
        saved: As `tensors_of` gave them, with any strides.

    Raises:
        ValueError: If names, shapes or types aren't those of this run; no tensor has been changed then.
    """
    _make_optimizer_state(t, saved["optimizer"])
    targets = tensors_of(t)
    for kind, tensors in targets.items():
        given = saved.get(kind, {})
        odd = tensors.keys() ^ given.keys()
        odd |= {name for name in tensors.keys() & given.keys() if _type(tensors[name]) != _type(given[name])}
        if odd:
            raise ValueError(f"{kind}: {sorted(odd)[0]} isn't the same in the checkpoint and in the model")
    if not 0 <= int(saved["optimizer"]["updates"]) <= step:
        raise ValueError(f"optimizer: more updates were applied than the {step} steps that were done")
    with torch.no_grad():
        for kind, tensors in targets.items():
            for name, target in tensors.items():
                target.copy_(saved[kind][name])
    if t.average is not None:
        t.average.go_on(step)
    t.rates.look_up()
    t.statistics.reload()


def _type(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _optimizer_tensors(t: Training) -> Iterator[tuple[str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in t.model.named_parameters()}
    for parameter, slots in t.optimizer.state.items():
        for slot, value in slots.items():
            yield f"{names[id(parameter)]}/{slot}", value
    yield "updates", t.rates.updates
    if t.scaler is not None:
        for name in _SCALER:
            yield f"scaler/{name}", _of_scaler(t, name)


def _of_scaler(t: Training, name: str) -> torch.Tensor:
    # torch makes these two when the first loss is scaled, and has no public name for them on the device.
    assert t.scaler is not None
    if t.scaler._scale is None:
        t.scaler._lazy_init_scale_growth_tracker(t.rates.current.device)
    value: torch.Tensor = getattr(t.scaler, name)
    return value


def _make_optimizer_state(t: Training, saved: Mapping[str, torch.Tensor]) -> None:
    """Makes the state that torch's AdamW would make at its first step, so that there is a place for it."""
    parameters = dict(t.model.named_parameters())
    missing = []
    for key, value in saved.items():
        name, slash, slot = key.rpartition("/")
        if slash and name in parameters and slot not in t.optimizer.state.get(parameters[name], {}):
            # The other optimisers here have theirs from the beginning.
            if not isinstance(t.optimizer, torch.optim.AdamW) or slot not in _ADAMW:
                raise ValueError(f"optimizer: {key} isn't what {type(t.optimizer).__name__} keeps")
            missing.append((parameters[name], slot, value))
    for parameter, slot, value in missing:
        like = parameter if value.shape == parameter.shape else value
        made = torch.zeros_like(like, dtype=value.dtype, device=parameter.device, requires_grad=False)
        t.optimizer.state[parameter][slot] = made
