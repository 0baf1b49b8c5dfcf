"""Promise: schedules, clipping and averages are what their sources say, also with a step that was skipped."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import OneCycleLR
from torch.testing import assert_close

from tests.helpers.refusals import refused
from trainer.config.model import ModelConfig
from trainer.config.optimizers import OPTIMIZERS, SCHEDULES
from trainer.config.recipe_file import load_recipe
from trainer.config.training import AverageConfig, OptimConfig
from trainer.data.sampling.plan import Plan
from trainer.models.gpt import GPT
from trainer.models.images import build_model
from trainer.optim import optimizers
from trainer.optim.average import WeightAverage
from trainer.optim.fused import AdamW
from trainer.optim.optimizers import (
    LRScheduler,
    clip_gradients,
    layer_factors,
    make_optimizer,
    parameter_groups,
)
from trainer.optim.schedules import schedule

pytestmark = pytest.mark.compat
CPU = torch.device("cpu")


def optimizer_of(
    model: nn.Module, config: OptimConfig, table: Sequence[float] = ()
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Also the rates that it follows: the configured one, or those of a table."""
    groups = parameter_groups(config, model)
    rates = LRScheduler([*table] or [config.lr], CPU, tuple({group["factor"] for group in groups}))
    return make_optimizer(config, groups, rates), rates


def backward_of(model: nn.Module, gradients: Iterable[torch.Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()


def shares(**config: Any) -> list[float]:
    return schedule(OptimConfig(lr=1.0, **{"milestones": (5,), **config}), 100, steps_per_epoch=20)


def test_a_milestone_is_an_epoch_of_the_data() -> None:
    """At its last step that has samples of it; where a run is cut it comes when it did, or never."""
    plan = Plan(samples=105, global_batch_size=10, micro_batch_size=10, epochs=4, last="cross", seed=0)
    config = OptimConfig(lr=1.0, schedule="step", milestones=(1, 2.5), warmup_steps=0)
    cases: list[tuple[Any, list[int]]] = [("cross", [11, 16]), ("drop", [10, 15]), ("weighted", [11, 17])]
    for last, (first, second) in cases:
        whole = replace(plan, last=last)
        rates = schedule(config, whole.steps, whole.epoch_length)
        lengths = [rates.count(rate) for rate in sorted(set(rates), reverse=True)]
        assert lengths == [first, second, whole.steps - first - second]
        cut = replace(whole, max_steps=15)
        assert schedule(config, cut.steps, cut.epoch_length) == rates[:15]
    with pytest.raises(ValueError, match=r"needs optim.milestones, epochs such as \[30, 60\]"):
        OptimConfig(schedule="step")


def test_wsd_is_stable_and_then_falls_like_one_minus_a_root() -> None:
    rates = shares(schedule="wsd", warmup_steps=0.1, decay=0.25, final_lr=0.1)
    assert rates[10:76] == [1.0] * 66
    assert rates[100 - 16] == pytest.approx(0.1 + 0.9 * (1 - (9 / 25) ** 0.5))
    with refused(by=ValueError):
        OptimConfig(schedule="wsd", warmup_steps=0.5, decay=0.6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_counts_steps_from_1_on(name: Any) -> None:
    assert shares(schedule=name, warmup_steps=10) == shares(schedule=name, warmup_steps=0.1)
    longer = [shares(schedule=name, warmup_steps=steps) for steps in (100, 101, 1000)]
    assert [rates.index(max(rates)) for rates in longer] == [99, 99, 99]
    assert longer[0][-1] == 1.0, "the peak is the run's last update"
    assert longer[0][-1] > longer[1][-1] > longer[2][-1], "it would come later"


def test_layers_learn_slower_the_deeper_they_are() -> None:
    model = build_model(ModelConfig(width=4, blocks=(1, 1)), 1, 10)
    factors = layer_factors(model, 0.5)
    parts = {"stem": 0.125, "blocks.0.conv1": 0.25, "blocks.1.shortcut": 0.5, "norm": 1.0, "head": 1.0}
    assert {part: factors[f"{part}.weight"] for part in parts} == parts
    assert factors["norm.bias"] == factors["head.bias"] == 1.0
    assert set(layer_factors(model, 1.0).values()) == {1.0}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_every_group_follows_the_schedule_at_its_own_rate(name: Any) -> None:
    """Against a run for each group alone, with the rate that the group should have."""
    model = build_model(ModelConfig(width=4, blocks=(1, 1)), 1, 10)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    config, table = OptimConfig(name=name, lr=0.1, layer_decay=0.5, weight_decay=0.2), [0.1, 0.05, 0.02]
    optimizer, rates = optimizer_of(model, config, table)
    gradients = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    for _ in table:
        backward_of(model, gradients.values())
        optimizer.step()
        rates.advance()
    make: Any = torch.optim.SGD if name == "sgd" else torch.optim.AdamW
    more = {"momentum": 0.9, "nesterov": True} if name == "sgd" else {}
    for n, p in model.named_parameters():
        alone = nn.Parameter(start[n].clone())
        reference = make([alone], weight_decay=0.2 if p.ndim >= 2 else 0.0, **more)
        for rate in table:
            reference.param_groups[0]["lr"] = rate * layer_factors(model, 0.5)[n]
            alone.grad = gradients[n].clone()
            reference.step()
        assert torch.allclose(p, alone, atol=1e-5), n


def torchs(updates: int, peak: float, make: Callable[[torch.optim.Optimizer], Any]) -> list[float]:
    """What a scheduler of torch gives each update."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = make(optimizer)
    rates = []
    for _ in range(updates):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("updates", "warmup", "final_lr"),
    [(1, 0.3, 0.0), (2, 0.8, 0.1), (7, 0.33, 0.0), (100, 0.0, 0.1), (431, 0.05, 0.1), (1000, 0.3, 0.0)],
)
def test_one_cycle_is_torchs(updates: int, warmup: float, final_lr: float) -> None:
    config = OptimConfig(lr=0.4, schedule="one-cycle", warmup_steps=warmup, final_lr=final_lr)
    ours, least = schedule(config, updates, updates), 0.04 / final_lr if final_lr else 1e4
    more: dict[str, Any] = {"pct_start": warmup, "final_div_factor": least, "cycle_momentum": False}
    theirs = torchs(updates, 0.4, lambda optimizer: OneCycleLR(optimizer, 0.4, updates, **more))
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert updates * warmup <= 1 or ours[0] == pytest.approx(0.4 / 25)


@pytest.mark.parametrize("warmup", [0.0, 0.13])
@pytest.mark.parametrize("name", ["cosine", "constant", "step"])
def test_the_others_are_torchs(name: Any, warmup: float) -> None:
    """In 100 updates; 0.55 of them are 55.00000000000001."""
    more: dict[str, Any] = {"final_lr": 0.1, "milestones": (0.295, 0.55), "gamma": 0.1}
    config = OptimConfig(lr=0.1, schedule=name, warmup_steps=warmup, **more)
    rise = round(100 * warmup)

    def make(optimizer: torch.optim.Optimizer) -> Any:
        after: dict[str, Callable[[], Any]] = {
            "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 100 - rise, eta_min=0.01),
            "constant": lambda: lr_scheduler.ConstantLR(optimizer, factor=1),
            "step": lambda: lr_scheduler.MultiStepLR(optimizer, [30 - rise, 55 - rise]),
        }
        if not rise:
            return after[name]()
        first = lr_scheduler.LinearLR(optimizer, start_factor=1 / rise, total_iters=max(1, rise - 1))
        return lr_scheduler.SequentialLR(optimizer, [first, after[name]()], milestones=[rise])

    assert schedule(config, 100, 100) == pytest.approx(torchs(100, 0.1, make), rel=1e-12)


def averages(at: int, **config: Any) -> tuple[WeightAverage, WeightAverage]:
    """Of a weight that was 1 and is 2, after so many updates, counted on the host and on the device."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    host, device = (WeightAverage(model, AverageConfig(decay=0.9, **config)) for _ in range(2))
    nn.init.constant_(model.weight, 2.0)
    host._moved = at
    device.moved_at.fill_(at)
    return host, device


def test_the_average_catches_up_in_the_last_step_and_counts_what_it_missed() -> None:
    """Also where some steps made no update: it moves for those that did since it moved last."""
    host, device = averages(1000, every=4)
    for step in range(1000, 1007):
        host.update(step, None, torch.zeros(1), last=step == 1006)
    assert host.tensors["weight"].item() == pytest.approx(2 - 0.9**7)
    host.go_on(1007)  # where the run is extended, these seven don't count again
    host.update(1007, None, torch.zeros(1))
    assert host.tensors["weight"].item() == pytest.approx(2 - 0.9**8)
    updates = torch.tensor([1000])
    for step in range(1000, 1007):
        skipped = torch.tensor(float(step in (1001, 1003)))  # the second of them is the fourth step
        device.update(step, skipped, updates, last=step == 1006)
        updates += 1 - skipped.to(torch.int64)
    assert device.tensors["weight"].item() == pytest.approx(2 - 0.9**5)


def test_the_rate_follows_applied_updates_only() -> None:
    rates = LRScheduler([1.0, 2.0, 3.0], CPU)
    seen, told = [float(rates.current)], []
    for skipped in (0.0, 1.0, 0.0, 0.0):
        rates.advance(torch.tensor(skipped))
        seen.append(float(rates.current))
        told.append(float(rates.of_last_update()))
    assert seen == [1.0, 2.0, 2.0, 3.0, 3.0]
    assert told == seen[:-1], "the rate that the update had, or would have had"
    assert int(rates.updates) == 3


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_clipping_is_torchs(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(3, 4, generator=generator) * scale, torch.randn(5, generator=generator) * scale]
    theirs = nn.ParameterList(torch.zeros_like(gradient) for gradient in ours)
    backward_of(theirs, ours)
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0, foreach=True)
    assert torch.equal(clip_gradients(ours, 1.0), norm)
    assert all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(theirs, ours, strict=True))


def test_the_average_moves_unless_skipped_and_faster_at_first() -> None:
    def after(*updates: tuple[int, bool]) -> float:
        on_host, on_device = averages(updates[0][0])
        for before, skipped in updates:
            if not skipped:
                on_host.update(before, None, torch.zeros(1))
            on_device.update(0, torch.tensor(float(skipped)), torch.tensor([before]))
        values = [average.tensors["weight"].item() for average in (on_host, on_device)]
        assert values[0] == pytest.approx(values[1])
        return float(values[0])

    assert after((1000, True)) == 1.0
    assert after((1000, False)) == pytest.approx(1.1)
    assert after((0, False)) == after((0, False), (1, True)) == pytest.approx(1.9)
    assert after((0, False), (1, False)) == pytest.approx(1.9 + 0.1 * 9 / 11)


def test_an_average_that_was_taken_over_moves_by_its_decay_at_once() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    average = WeightAverage(model, AverageConfig(decay=0.9))
    average.before = 1_000_000
    nn.init.constant_(model.weight, 2.0)
    average.update(0, None, torch.zeros(1))
    assert average.tensors["weight"].item() == pytest.approx(1.1)


def test_in_place_the_model_has_the_average_to_the_bit_and_then_its_weights_again() -> None:
    """Where they lie, too, with the trained buffers, and also after an error."""
    model = nn.BatchNorm1d(2)
    average = WeightAverage(model, AverageConfig(decay=0.9))
    nn.init.constant_(model.weight, 0.1)
    assert model.running_mean is not None
    model.running_mean.fill_(3.0)
    view, address = model.weight.data, model.weight.data_ptr()
    with pytest.raises(RuntimeError, match="evaluation"), average.in_place():
        assert view.tolist() == [1.0, 1.0] and model.weight.data_ptr() == address
        assert model.running_mean.tolist() == [3.0, 3.0]
        raise RuntimeError("evaluation")
    assert bool((view == 0.1).all()) and average.tensors["weight"].tolist() == [1.0, 1.0]


def test_the_average_of_bfloat16_weights_is_float32() -> None:
    """A step of a thousandth is lost in bfloat16."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    average = WeightAverage(model, AverageConfig(decay=0.999))
    nn.init.constant_(model.weight, 1.5)
    average.before = 20_000
    for step in range(2):
        average.update(step, None, torch.zeros(1))
    wanted = torch.tensor(1.5 - 0.5 * 0.999**2)
    with average.in_place():
        assert model.weight.dtype == torch.bfloat16 and model.weight.item() == wanted.bfloat16().item()
    assert average.tensors["weight"].item() == pytest.approx(wanted.item(), abs=1e-7)
    assert model.weight.item() == 1.5


class Shapes(nn.Module):
    """A class token, positions, an embedding that is tied to the head, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.embed = nn.Embedding(3, 4)
        self.encoder = nn.ModuleDict({"positions": nn.Embedding(5, 4), "norm": nn.LayerNorm(4)})
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.head = nn.Linear(4, 3)
        self.head.weight = self.embed.weight


NORMS_AND_BIASES = ("encoder.norm.weight", "encoder.norm.bias", "head.bias")


@pytest.mark.parametrize(
    ("settings", "without"),
    [
        ({}, {*NORMS_AND_BIASES}),
        ({"decay_1d": True}, set()),
        ({"decay_1d": True, "no_decay": ("*.bias",)}, {"encoder.norm.bias", "head.bias"}),
        ({"decay_1d": True, "no_decay": ("class_token", "scal?")}, {"class_token", "scale"}),
        ({"decay_1d": True, "no_decay": ("head.weight",)}, {"embed.weight"}),  # tied: either name
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",  # sets have no order
)
def test_what_has_no_weight_decay_is_named(settings: dict[str, Any], without: set[str]) -> None:
    model = Shapes()
    config = OptimConfig(weight_decay=0.3, layer_decay=1.0, **settings)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(config, model)
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    assert decay == {name: 0.0 if name in without else 0.3 for name in names.values()}


def test_a_recipe_decays_what_its_source_does() -> None:
    """nanoGPT prints "non-decayed parameter tensors: 25, with 19,200 parameters" of its 124 million."""
    with torch.device("meta"):
        gpt = GPT(load_recipe("gpt2-124m", []).language, 50304)
        vit = build_model(ModelConfig(name="vit_small"), 3, 1000)
        resnet = build_model(ModelConfig(name="resnet50"), 3, 1000)
    spared = optimizers.undecayed(load_recipe("gpt2-124m", []).optim, gpt)
    assert (len(spared), sum(gpt.get_parameter(name).numel() for name in spared)) == (25, 19_200)
    few = {name for name, p in vit.named_parameters() if p.ndim < 2}
    found = {*optimizers.undecayed(load_recipe("vit-small", []).optim, vit)}
    assert found == few | {"class_token", "encoder.pos_embedding"}
    assert not optimizers.undecayed(load_recipe("resnet50-imagenet", []).optim, resnet)


def test_a_pattern_without_a_parameter_is_refused_with_the_nearest_name() -> None:
    with refused("optim.no_decay clas_token class_token"):
        parameter_groups(OptimConfig(no_decay=("scale", "clas_token")), Shapes())


@pytest.mark.parametrize(("nesterov", "momentum"), [(True, 0.0), (True, 0.9), (False, 0.9)])
def test_sgd_is_torchs_with_either_momentum(nesterov: bool, momentum: float) -> None:
    """And with decay_1d it is that of torch.optim.SGD(model.parameters())."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    twin = copy.deepcopy(model)
    same: dict[str, Any] = {"lr": 0.125, "momentum": momentum, "weight_decay": 0.3}
    ours, _ = optimizer_of(model, OptimConfig(name="sgd", nesterov=nesterov, decay_1d=True, **same))
    theirs = torch.optim.SGD(twin.parameters(), nesterov=nesterov and momentum > 0, **same)
    for _ in range(4):
        gradients = [torch.randn_like(one) for one in model.parameters()]
        backward_of(model, gradients)
        backward_of(twin, gradients)
        ours.step()
        theirs.step()
    assert_close([*model.parameters()], [*twin.parameters()], rtol=0, atol=1e-12)


def test_momentum_begins_at_zero_where_the_first_update_is_skipped() -> None:
    """torch's fused SGD leaves it as memory happens to be, which is not NaN each time: looked at before."""
    model = nn.Linear(2, 2)
    start = copy.deepcopy([*model.parameters()])
    optimizer, _ = optimizer_of(model, OptimConfig(name="sgd", momentum=0.9, weight_decay=0.1))
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.full((1, 2), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    for parameter, before, momentum in zip(model.parameters(), start, momenta, strict=True):
        assert torch.equal(parameter, before)
        assert optimizer.state[parameter]["momentum_buffer"] is momentum and not momentum.any()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_updates_are_right_for_channels_last_weights(name: Any) -> None:
    """Fused CPU optimizers are silently wrong where strides of gradient, state and weight differ."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model: nn.Module = nn.Conv2d(3, 4, 3).to(memory_format=layout)  # type: ignore[call-overload]
        optimizer, _ = optimizer_of(model, OptimConfig(name=name, lr=0.1, weight_decay=0.1))
        image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(memory_format=layout)
        for _ in range(3):
            model(image).square().sum().mul(1e-3).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(next(model.parameters()).detach().contiguous())
    assert torch.allclose(results[0], results[1], atol=1e-5)


def test_the_way_to_adamws_kernel_changes_no_bit() -> None:
    """Over torch's own step: two groups, a parameter without a gradient, one that gets its first one late."""
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.ones(3, 2)) for _ in range(4)] for _ in range(2))
    settings: dict[str, Any] = {"lr": torch.tensor(0.1), "betas": (0.8, 0.95), "eps": 1e-6, "fused": True}

    def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": of[:3], "weight_decay": 0.1}, {"params": of[3:], "weight_decay": 0.0}]

    one, other = AdamW(groups(ours), **settings), torch.optim.AdamW(groups(theirs), **settings)
    for step in range(6):
        for number in range(4):
            gradient = torch.randn(3, 2)
            present = number != 1 and (number != 2 or step > 2) and (number != 3 or step != 4)
            ours[number].grad = gradient if present else None
            theirs[number].grad = gradient.clone() if present else None
        one.step()
        other.step()
    assert all(map(torch.equal, ours, theirs))
    for mine, torchs in zip(ours, theirs, strict=True):
        assert one.state[mine].keys() == other.state[torchs].keys()
        assert all(torch.equal(one.state[mine][slot], other.state[torchs][slot]) for slot in one.state[mine])


@pytest.mark.parametrize("odd", ["closure", "hook", "skipped", "mixed"])
def test_what_is_out_of_the_ordinary_is_left_to_torchs_adamw(
    odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = [torch.float32, torch.float64][: 2 if odd == "mixed" else 1]
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in types]
    optimizer, seen = AdamW([{"params": parameters}], lr=0.1, fused=True), list[str]()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in parameters]
    if odd == "hook":
        optimizer.register_step_pre_hook(lambda *_: seen.append("hook"))
    if odd == "skipped":
        optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    monkeypatch.setattr("trainer.optim.fused._fused_adamw", lambda *_: seen.append("at once"))
    assert optimizer.step((lambda: 3.0) if odd == "closure" else None) == (3.0 if odd == "closure" else None)
    assert seen == (["hook"] if odd == "hook" else [])
    unchanged = [torch.equal(old, new) for old, new in zip(before, parameters, strict=True)]
    assert unchanged == [odd == "skipped"] * len(parameters)


@pytest.mark.parametrize(
    "settings",
    [*({"name": name} for name in OPTIMIZERS), {"name": "sgd", "momentum": 0.0}],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_each_optimizer_says_what_it_keeps(settings: dict[str, Any]) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[1].bias.requires_grad_(False)
    config = OptimConfig(**settings)
    optimizer, _ = optimizer_of(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    kept = {
        id(p): sum(slot.numel() for slot in slots.values() if slot.ndim) / p.numel()
        for p, slots in optimizer.state.items()
    }
    said = optimizers.moments_kept(config, model)
    assert {p: n for p, n in said.items() if n} == {p: n for p, n in kept.items() if n}
    sizes = (round(kept.get(id(p), 0) * p.nbytes) for p in model.parameters())
    assert optimizers.bytes_of_moments(config, model) == sum(sizes)
