"""Promise: a model of transformers learns here what a plain loop over single documents learns of it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from benchmarks.sft import plain_losses
from tests.helpers.forked import attempt
from tests.helpers.hf_models import NEEDS, folder_of, made
from tests.helpers.refusals import named, refused
from tests.helpers.rows import read_rows
from tests.helpers.steps import ALONE, flat, gradients_of
from tests.helpers.toys import build_alone, make_recipe
from tests.helpers.world import Ranks
from trainer.config.recipe import Recipe
from trainer.data.dataset import NUM_ITEMS
from trainer.data.formats.documents import TARGETS
from trainer.distributed.parallel import World
from trainer.models import head_loss
from trainer.train.components.run import build
from trainer.train.components.task import check_request, make_task
from trainer.train.model_of_run import read_samples
from trainer.train.state import Run

pytestmark = NEEDS

# Without the dropout that GPT-2's configuration has by default.
WORDS = {"vocab_size": 256, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def recipe_of(folder: Path, text: str = "packed", **sections: Any) -> Recipe:
    model = {"name": f"hf/{folder}", **sections.pop("model", {})}
    data = {"name": "synthetic", "samples": 16, "limit": 12, "global_batch_size": 12, "micro_batch_size": 4}
    language = {"text": text, "sequence_length": 24}
    return make_recipe(task="language", data=data, model=model, language=language, **sections)


def first_gradients(recipe: Recipe, world: World = ALONE) -> tuple[Run, dict[str, torch.Tensor]]:
    """Those that the first update gets, by name."""
    run = build(recipe, make_task(recipe), world, 0)
    assert (run.state.rows is not None) == (world.size > 1)
    return run, gradients_of(run)[0][0]


def plain(recipe: Recipe, theirs: Any) -> dict[str, torch.Tensor]:
    """Gradients of a loop over single documents: the mean over all tokens that are predicted."""
    task: Any = make_task(recipe)
    batch = read_samples(task.train_data, torch.arange(len(task.train_data)).numpy())
    tokens, *segments = task.inputs(batch)
    counts = torch.arange(tokens.shape[1]) < batch.fields[NUM_ITEMS][:, None]
    targets = torch.where(counts, batch.fields[TARGETS].long(), head_loss.IGNORED)
    segment = segments[0] if segments else None
    total = int((targets != head_loss.IGNORED).sum())
    for row in range(len(tokens)):
        cuts = [0, len(tokens[row])]
        if segment is not None:
            cuts[1:1] = ((segment[row][1:] != segment[row][:-1]).nonzero()[:, 0] + 1).tolist()
        for start, stop in pairwise(cuts):
            logits = theirs(tokens[row : row + 1, start:stop]).logits[0]
            (F.cross_entropy(logits, targets[row, start:stop], reduction="sum") / total).backward()
    return {name: one.grad for name, one in theirs.named_parameters()}


def close(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((ours - wanted).norm() <= 1e-5 * wanted.norm())


# The loss of whole logits, or in pieces of a few tokens.
WHOLE, PIECES = head_loss.PIECE, 256 * 5


@pytest.mark.parametrize(
    ("family", "text", "piece"),
    [("qwen3", "packed", WHOLE), ("gemma2", "padded", PIECES), ("gpt2", "packed", PIECES)],
)
def test_a_step_with_accumulation_is_that_of_a_plain_loop(
    family: str, text: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "PIECE", piece)
    recipe = recipe_of(folder_of(family, tmp_path, **WORDS), text)
    wanted = plain(recipe, made(family, **WORDS).train())
    _, found = first_gradients(recipe)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not close(found[name], wanted[name])] == []


def test_lora_learns_what_the_weights_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "PIECE", PIECES)
    lora = {"rank": 3, "alpha": 6.0, "targets": ["*.q_proj", "*.down_proj", "lm_head"]}
    recipe = recipe_of(folder_of("llama", tmp_path, **WORDS), model={"lora": lora})
    wanted = plain(recipe, made("llama", **WORDS))
    run, found = first_gradients(recipe)
    state = run.state.model.state_dict()
    assert len(found) == 2 * (2 + 2 + 1)
    for name in (one.removesuffix(".lora_b") for one in found if one.endswith(".lora_b")):
        # B is zero at first: its gradient is that of the weight, seen through A.
        assert close(found[f"{name}.lora_b"], 2.0 * wanted[f"{name}.weight"] @ state[f"{name}.lora_a"].T)
        assert not found[f"{name}.lora_a"].any()


@pytest.mark.parametrize(
    ("family", "lora", "names"),
    [("gemma", {"targets": ["lm_head"]}, "lm_head embedding"), ("gpt2", {}, "Conv1D")],
)
def test_lora_where_it_cannot_be_is_refused(
    family: str, lora: dict[str, Any], names: str, tmp_path: Path
) -> None:
    recipe = recipe_of(folder_of(family, tmp_path, **WORDS), model={"lora": {"rank": 2, **lora}})
    with refused(names):
        check_request(recipe, make_task(recipe), 1)


def learned_of(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [row["loss"] for kind in ("train", "eval") for row in read_rows(folder, (kind,))]
    return losses, load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "text", "lora", "piece"),
    [
        ("llama", "packed", {"rank": 2, "targets": ["all-linear"], "dropout": 0.2}, WHOLE),
        ("gemma2", "padded", {"rank": 2, "modules_to_save": ["norm"]}, PIECES),
    ],
)
def test_what_is_held_in_bfloat16_changes_no_bit(
    family: str, text: str, lora: Any, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights whose files are in bfloat16, which autocast would round to the same ones."""
    monkeypatch.setattr(head_loss, "PIECE", piece)
    made(family, **WORDS).bfloat16().save_pretrained(tmp_path / "model")
    found, sizes = [], []
    for dtype in ("fp32", "bf16"):
        model = {"lora": lora, "frozen_dtype": dtype}
        short: dict[str, Any] = {"optim": {"lr": 0.05}, "log": {"every": 1, "to": ["jsonl"]}}
        short |= {"epochs": 3, "precision": {"mode": "bf16"}, "evaluation": {"every": "1 step"}}
        recipe = recipe_of(tmp_path / "model", text, model=model, **short)
        attempt(tmp_path / dtype, recipe, code=0)
        found.append(learned_of(tmp_path / dtype))
        run = build_alone(recipe, make_task(recipe))
        sizes.append(sum(one.nbytes for one in run.state.model.parameters() if not one.requires_grad))
    (losses, plain), (low_losses, low) = found
    assert losses == low_losses and len(losses) == 2 * 3
    for name, tensor in plain.items():
        assert low[name].dtype == torch.float32 and torch.equal(tensor, low[name]), name
    # The norms stay, and an embedding that is multiplied in its own type of number.
    assert sizes[1] < (0.75 if family == "gemma2" else 0.55) * sizes[0]


def rank_step(world: World, recipe: Recipe) -> dict[str, torch.Tensor]:
    return first_gradients(recipe, world)[1]


def test_two_ranks_that_share_it_learn_alike(ranks: Ranks, tmp_path: Path) -> None:
    folder, memory = folder_of("gemma3_text", tmp_path, **WORDS), {"checkpointing": "blocks"}
    recipe = recipe_of(folder, memory=memory)
    sharded = recipe_of(folder, parallel={"strategy": "fsdp", "threads": 1}, memory=memory)
    recipe.data.micro_batch_size = sharded.data.micro_batch_size = 2
    alone, together = rank_step(ALONE, recipe), ranks.run(2, rank_step, sharded)[0]
    assert close(flat(together), flat(alone)) and together.keys() == alone.keys()


def test_a_run_with_a_base_in_bfloat16_is_resumed_and_measured(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "model", **WORDS)
    lora = {"rank": 2, "dropout": 0.3, "modules_to_save": ["embed_tokens", "lm_head"]}
    sections: Any = {"model": {"lora": lora, "frozen_dtype": "bf16"}, "precision": {"mode": "bf16"}}
    sections |= {"checkpoint": {"every": 2, "minutes": 0, "best": False}, "log": {"to": ["jsonl"]}}
    recipe = recipe_of(folder, epochs=4, **sections)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = attempt(whole, recipe, code=0)
    assert named(done.said, "model.embed_tokens lm_head 0.3 bfloat16")
    attempt(parts, recipe, stop_after=3, code=75)
    attempt(parts, recipe, code=0)
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    base, ended = load_file(folder / "model.safetensors"), load_file(whole / "model.safetensors")
    assert ended["model.embed_tokens.weight"].dtype == ended["lm_head.weight"].dtype == torch.float32
    for name, tensor in base.items():
        assert torch.equal(tensor, ended[name]) == ("norm" in name), name


def test_some_steps_of_lora_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "model", **WORDS)
    optim = {"lr": 0.01, "schedule": "constant", "weight_decay": 0.0}
    lora = {"lora": {"rank": 2, "targets": ["all-linear"]}}
    recipe = recipe_of(folder, model=lora, epochs=4, optim=optim, log={"every": 1, "to": ["jsonl"]})
    attempt(tmp_path / "run", recipe, code=0)
    ours = [row["loss"] for row in read_rows(tmp_path / "run", ("train",))]
    assert ours == pytest.approx(list(plain_losses(recipe)), rel=1e-5)
    assert len(ours) == 4 and ours[3] < ours[0]
