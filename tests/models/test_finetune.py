"""Promise: what is frozen stays as it is to the bit; LoRA begins as the base, and merged computes alike."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torchvision.models import SwinTransformer, VisionTransformer

from tests.helpers.forked import attempt, small
from tests.helpers.refusals import named, refused
from tests.helpers.steps import ALONE, assert_same_bits, train_some
from tests.helpers.toys import build_alone, make_recipe, run_steps
from tests.helpers.world import Ranks
from trainer.config.model import ModelConfig
from trainer.config.recipe import Recipe
from trainer.config.tasks import GPTConfig
from trainer.distributed.parallel import World
from trainer.models.finetune import (
    adapted,
    fine_tune,
    keeps_statistics,
    like,
    merged,
    plain_state,
    saved_modules,
)
from trainer.models.gpt import GPT
from trainer.models.images import build_model, make_norm
from trainer.train.components.operations import count_operations
from trainer.train.components.run import build
from trainer.train.components.task import check_request, make_task
from trainer.train.model_of_run import open_run
from trainer.train.state import whole_model

FROZEN, KEPT = {"width": 4, "freeze": ["stem", "blocks.0*", "norm"]}, ("stem.", "blocks.0.", "norm.")


def test_a_groupnorm_stands_behind_frozen_layers(tmp_path: Path) -> None:
    data = {"name": "digits", "global_batch_size": 4, "micro_batch_size": 4}
    recipe = small(max_steps=2, model={"norm": "group", "freeze": ["stem*"]}, data=data)
    assert attempt(tmp_path / "run", recipe).code == 0


@pytest.mark.parametrize("trained", [True, False])
def test_a_groupnorm_computes_what_torchs_does(trained: bool) -> None:
    ours, plain = make_norm("group", 8), nn.GroupNorm(8, 8)
    images, weights = torch.randn(2, 8, 5, 5), torch.randn(2, 8, 5, 5)
    last = images.to(memory_format=torch.channels_last).requires_grad_(trained)
    (ours(last) * weights).sum().backward()
    (plain(images.requires_grad_()) * weights).sum().backward()  # whose channels don't come last
    assert torch.allclose(ours(last), plain(images), atol=1e-6)
    found, wanted = ([p.grad for p in one.parameters()] for one in (ours, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_frozen_stays_to_the_bit_and_a_resumed_run_ends_alike(tmp_path: Path) -> None:
    parallel = {"reduction": "tree", "threads": 1}
    recipe = small(model=FROZEN, optim={"name": "sgd"}, parallel=parallel, max_steps=6)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = attempt(whole, recipe)
    assert done.code == 0 and named(done.said, "frozen stem blocks.0* norm BatchNorm"), done.said
    torch.manual_seed(0)
    begun = build_alone(recipe, make_task(recipe)).state.model.state_dict()
    assert attempt(parts, recipe, stop_after=4).code == 75
    assert attempt(parts, recipe).code == 0
    for name in ("model.safetensors", "ema.safetensors"):
        ended = safetensors.torch.load_file(whole / name)
        same = {name for name, tensor in ended.items() if torch.equal(tensor, begun[name])}
        assert same == {name for name in begun if name.startswith(KEPT)}
        assert (whole / name).read_bytes() == (parts / name).read_bytes()


@pytest.mark.parametrize(
    "frozen", [{"freeze": ["stem", "blocks"]}, {"lora": {"rank": 2, "targets": ["head"]}}]
)
def test_what_a_step_computes_is_counted_without_what_is_frozen(frozen: dict[str, Any]) -> None:
    counts = []
    for model in ({}, frozen):
        recipe = make_recipe(model={"width": 8, **model}, data={"micro_batch_size": 16, "workers": 0})
        task = make_task(recipe)
        trained = build_alone(recipe, task).state.model
        counts.append(count_operations(task, trained, 4, torch.device("cpu")).per_sample)
    assert counts[0] and counts[1] and counts[1] < 0.6 * counts[0]


def test_its_batchnorm_computes_as_in_evaluation() -> None:
    model = build_model(ModelConfig(width=8), 1, 10)
    fine_tune(model, ModelConfig(width=8, freeze=("blocks.0",)))
    frozen = [name for name, module in model.named_modules() if keeps_statistics(module)]
    assert frozen == ["blocks.0.norm1", "blocks.0.norm2"]
    model.train()
    assert not model.get_submodule("blocks.0.norm1").training and model.get_submodule("norm").training
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    assert torch.equal(model.get_buffer("blocks.0.norm1.running_mean"), torch.zeros(8))
    assert not torch.equal(model.get_buffer("norm.running_mean"), torch.zeros(16))
    assert model.get_parameter("blocks.0.conv1.weight").grad is None
    # Of which something learns they keep counting.
    fine_tune(model := build_model(ModelConfig(width=8), 1, 10), ModelConfig(width=8, freeze=("*.bias",)))
    assert not any(map(keeps_statistics, model.modules()))


def test_a_layer_that_begins_anew_is_not_frozen() -> None:
    """Neither a parameter nor a BatchNorm's statistics would ever be more than drawn at random."""
    model, _ = models()[0]
    names = [*model.state_dict()]
    first, last = (name.rpartition(".")[0] for name in (names[0], names[-1]))
    start = {"pretrained": Path("start.safetensors")}
    for freeze, reinit in ((first, f"{first}.*"), (names[0], first)):
        with refused("model.freeze model.reinit", names[0]):
            fine_tune(models()[0][0], ModelConfig(**start, freeze=(freeze,), reinit=(reinit,)))
    fine_tune(model, ModelConfig(**start, freeze=(first,), reinit=(last,)))


@pytest.mark.parametrize(
    ("freeze", "message"), [(["haed"], "model.freeze 'haed' 'head'"), (["*"], "model.freeze=['*']")]
)
def test_a_pattern_that_freezes_nothing_or_all_is_bad_input(freeze: list[str], message: str) -> None:
    recipe = make_recipe(model={"width": 8, "freeze": freeze})
    with refused(message):
        check_request(recipe, make_task(recipe), 1)


def lora_of(**lora: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "auto", "lora": {"rank": 2, **lora}})


GPT_OF_TWO = GPTConfig(layers=2, heads=2, width=16, sequence_length=8)
GPTS = [GPT_OF_TWO, GPT_OF_TWO.model_copy(update={"mlp": "gelu", "norm": "layer", "bias": True})]
LORA = lora_of(rank=4, alpha=8)


def vit() -> nn.Module:
    model: nn.Module = VisionTransformer(8, 4, 2, 2, 16, 32, num_classes=5)
    nn.init.normal_(model.get_parameter("heads.head.weight"))  # zero at first
    return model


def swin() -> Any:
    """Its attention reads the weights of linear layers, and never calls them."""
    return SwinTransformer([2, 2], 8, [2], [2], [2, 2], stochastic_depth_prob=0.0, num_classes=5)


def models() -> list[tuple[nn.Module, torch.Tensor]]:
    tokens, images = torch.randint(0, 11, (3, 8)), torch.randn(3, 3, 8, 8)
    return [*((GPT(config, 11), tokens) for config in GPTS), (vit(), images), (swin(), images)]


def learned(model: nn.Module) -> None:
    """As if it had been trained."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)


@pytest.mark.compat
@pytest.mark.parametrize("number", range(4))
def test_lora_begins_as_the_base_and_merged_it_computes_alike(number: int) -> None:
    torch.manual_seed(number)
    model, inputs = models()[number]
    model.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    names, base = list(model.state_dict()), model.eval()(inputs)
    line = fine_tune(model, LORA)
    assert torch.equal(model(inputs), base)
    model.train()
    assert torch.equal(model(inputs), base)
    trained = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lora_a", "lora_b"}
    assert named(line, "LoRA 4 8")
    learned(model)
    model(inputs).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == parameter.requires_grad, name
    model.eval()
    unmerged = model(inputs)
    assert not torch.allclose(unmerged, base)
    plain = {name: tensor[...] for name, tensor in plain_state(model).items()}
    assert list(plain) == names
    fresh = models()[number][0].double().eval()
    fresh.load_state_dict(plain)
    assert torch.allclose(fresh(inputs), unmerged, rtol=1e-12, atol=1e-12)
    other = models()[number][0].double().eval()
    like(other, model)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(inputs), unmerged)


def test_without_gradients_it_computes_alike() -> None:
    """torch's kernel for a whole layer, as in evaluation, reads the weights of linear layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, inputs = nn.TransformerEncoder(layer, 2), torch.randn(3, 5, 8)
    assert "on 8 layers" in fine_tune(model, LORA)
    learned(model)
    expected = model(inputs)
    with torch.no_grad():
        assert torch.allclose(model.eval()(inputs), expected, atol=1e-5)


def test_what_is_learned_counts_alpha_by_rank_times() -> None:
    tensors = {"a.weight": torch.eye(2), "a.lora_a": torch.ones(1, 2), "a.lora_b": torch.ones(2, 1)}
    assert merged(tensors, 0.5)["a.weight"].tolist() == [[1.5, 0.5], [0.5, 1.5]]
    model, _ = models()[0]
    fine_tune(model, LORA)
    assert {m.lora_scale for m in model.modules() if hasattr(m, "lora_scale")} == {2.0}


class Tenfold(nn.Linear):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return 10 * super().forward(values)


def test_lora_of_named_layers_and_a_new_head() -> None:
    model = build_model(ModelConfig(width=8), 1, 10)
    lora = {"rank": 2, "targets": ["head"]}
    fine_tune(model, ModelConfig(pretrained=Path("x.safetensors"), reinit=("norm",), lora=lora))
    learned = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learned == ["norm.weight", "norm.bias", "head.lora_a", "head.lora_b"]
    with pytest.raises(ValueError, match=r"model\.lora"):
        ModelConfig.model_validate({"freeze": ["head"], "lora": {"rank": 1}})


def language_model() -> nn.Module:
    """Names as language models have them, with a head of its own and two embeddings."""
    layers = [
        nn.ModuleDict({"attn": nn.ModuleDict({"q_proj": nn.Linear(4, 4), "v_proj": nn.Linear(4, 4)})})
        for _ in range(2)
    ]
    body = nn.ModuleDict({"embed_tokens": nn.Embedding(5, 4), "layers": nn.ModuleList(layers)})
    head = nn.ModuleDict({"head": nn.Linear(4, 5), "sub": nn.ModuleDict({"head": nn.Linear(4, 5)})})
    return nn.ModuleDict({"model": body, **head})


def layer_of(name: str) -> list[str]:
    return [f"model.layers.{n}.attn.{name}" for n in range(2)]


@pytest.mark.parametrize(
    ("targets", "saved", "layers"),
    [
        (["q_proj"], [], layer_of("q_proj")),
        (["attn.v_proj"], [], layer_of("v_proj")),
        (["all-linear", "head"], [], [*layer_of("q_proj"), *layer_of("v_proj"), "head"]),
        # what is called so, and no end of another name
        (["1.attn.q_proj", "sub.head"], ["embed_tokens"], [layer_of("q_proj")[1], "sub.head"]),
        ([], ["v_proj", "head"], layer_of("q_proj")),
    ],
)
def test_names_are_read_as_peft_reads_them(targets: list[str], saved: list[str], layers: list[str]) -> None:
    model = language_model()
    line = fine_tune(model, lora_of(targets=targets, modules_to_save=saved))
    assert adapted(model) == [name for name, _ in model.named_modules() if name in layers] and layers
    assert named(line, len(layers))
    whole = saved_modules(model, saved)
    learned = {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name}
    assert learned == {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in whole}
    assert named(line, *whole)


def tied() -> nn.Module:
    """Its head would be two weights if it were merged."""
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5), "x": nn.Linear(4, 4)})
    model["head"].weight = model["embedding"].weight
    return model


@pytest.mark.parametrize(
    ("model", "lora", "names"),
    [
        (language_model, {"targets": ["embed_tokens"]}, "model.embed_tokens Embedding modules_to_save"),
        (language_model, {"targets": ["q_porj"]}, "model.lora.targets q_porj"),
        (language_model, {"targets": ["head"], "modules_to_save": ["head"]}, "targets modules_to_save head"),
        (tied, {"targets": ["head"]}, "head"),
        # Without effect where a weight is read.
        (vit, {"dropout": 0.1}, "model.lora.dropout model.lora.targets"),
    ],
)
def test_what_cannot_be_adapted_is_refused(model: Any, lora: dict[str, Any], names: str) -> None:
    with refused(names):
        fine_tune(model(), lora_of(**lora))


def test_what_shares_a_weight_with_a_module_to_save_is_trained_with_it() -> None:
    fine_tune(model := tied(), lora_of(targets=["x"], modules_to_save=["head"]))
    learned = {name for name, one in model.named_parameters() if one.requires_grad}
    assert {"embedding.weight", "head.bias"} < learned


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_dropout_acts_on_what_the_update_is_computed_of(rate: float) -> None:
    model, x = nn.ModuleDict({"x": nn.Linear(4, 3)}), torch.randn(50, 4)
    fine_tune(model, lora_of(alpha=6, targets=["x"], dropout=rate))
    learned(model)
    layer: Any = model["x"].train()
    torch.manual_seed(3)
    found, after = layer(x), torch.get_rng_state()
    torch.manual_seed(3)
    assert (rate == 0) == torch.equal(after, torch.get_rng_state()), "drawn for nothing"
    dropped = nn.functional.dropout(x, rate) if rate else x
    plain = x @ layer._parameters["weight"].T + layer.bias
    assert torch.allclose(found, plain + 3 * dropped @ layer.lora_a.T @ layer.lora_b.T, atol=1e-6)
    assert torch.allclose(layer.eval()(x), plain + 3 * x @ layer.lora_a.T @ layer.lora_b.T, atol=1e-6)


def test_only_what_autocast_rounds_anyway_is_held_in_bfloat16() -> None:
    """Not a weight that something else computes with: a subclass, a norm, an embedding that is written to."""
    embeddings = {"embedding": nn.Embedding(5, 4), "clipped": nn.Embedding(5, 4, max_norm=1.0)}
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), Tenfold(4, 4))])
    model = nn.ModuleDict({**embeddings, "norm": nn.LayerNorm(4), "blocks": blocks})
    model.update({"shared": Tenfold(4, 4), "head": nn.Linear(4, 4)})
    model["shared"].weight = model["head"].weight
    line = fine_tune(model, lora_of(targets=["all-linear"]).model_copy(update={"frozen_dtype": "bf16"}))
    low = [name for name, one in model.named_parameters() if one.dtype == torch.bfloat16]
    assert low == ["embedding.weight", "blocks.0.0.weight"]
    assert named(line, "2 bfloat16")
    assert model["embedding"](torch.tensor([1])).dtype == torch.float32
    assert model["blocks"][0][0].lora_a.dtype == torch.float32  # type: ignore[index]


def gpt_recipe(**sections: Any) -> Recipe:
    sizes = {"samples": 64, "workers": 0, "global_batch_size": 4, "micro_batch_size": 2}
    values: dict[str, Any] = {
        **{"task": "language", "epochs": 1, "max_steps": 8, "data": {"name": "synthetic", **sizes}},
        "language": {"layers": 2, "heads": 2, "width": 16, "sequence_length": 16},
        **{"model": {"lora": {"rank": 2}}, "ema": {"decay": 0.9}, "parallel": {"threads": 1}},
        "checkpoint": {"every": 3, "minutes": 0, "best": False},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Recipe.model_validate(values)


def test_a_run_with_lora_is_resumed_to_the_bit_and_leaves_a_plain_model(tmp_path: Path) -> None:
    recipe = gpt_recipe(optim={"lr": 0.02})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = attempt(whole, recipe)
    assert done.code == 0 and named(done.said, "LoRA 2 8"), done.said
    assert attempt(parts, recipe, stop_after=5).code == 75
    stopped = open_run(parts)  # of a checkpoint: merged as it is read
    assert stopped.weights.startswith("checkpoints/")
    assert attempt(parts, recipe).code == 0
    for name in ("model.safetensors", "ema.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
        assert not [key for key in safetensors.torch.load_file(whole / name) if "lora" in key]
    final, last = open_run(whole, weights="model.safetensors"), open_run(whole, checkpoint="last")
    assert final.model.state_dict().keys() == last.model.state_dict().keys()
    assert_same_bits({**last.model.state_dict()}, safetensors.torch.load_file(whole / "ema.safetensors"))
    base = build_alone(recipe, make_task(recipe)).state.model.state_dict()
    ended = final.model.state_dict()
    moved = {name for name in ended if not torch.equal(ended[name], base[name])}
    assert moved == {name for name in ended if ".attention." in name or ".mlp." in name}


def two_steps(world: World) -> dict[str, torch.Tensor]:
    parallel = {"strategy": "fsdp" if world.size > 1 else "ddp"}
    run_steps(run := build(gpt_recipe(parallel=parallel), make_task(gpt_recipe()), world, workers=0), 2)
    return {name: tensor.clone() for name, tensor in whole_model(run.state).items()}


def test_sharded_lora_leaves_the_base_as_it_is(ranks: Ranks) -> None:
    torch.testing.assert_close(ranks.run(2, two_steps)[0], two_steps(ALONE), rtol=1e-5, atol=1e-5)


def frozen_steps(world: World, reduction: str) -> dict[str, torch.Tensor]:
    recipe = make_recipe(
        model={**FROZEN, "width": 8},
        data={"micro_batch_size": 16, "workers": 0},
        parallel={"threads": 1, "reduction": reduction, "sync_batchnorm": reduction == "all_reduce"},
    )
    return train_some(recipe, make_task(recipe), range(3), world=world)[0]["model"]


@pytest.mark.parametrize("reduction", ["all_reduce", "tree"])
def test_several_ranks_freeze_alike(ranks: Ranks, reduction: str) -> None:
    (alone,), two = ranks.run(1, frozen_steps, reduction), ranks.run(2, frozen_steps, reduction)
    assert_same_bits(*two)
    for name, tensor in alone.items():
        if reduction == "tree" or name.startswith(KEPT):
            assert torch.equal(two[0][name], tensor), name
