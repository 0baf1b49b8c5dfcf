"""A random recipe by its seed: sections, number of ranks, how its attempts end, and which commands follow."""

import random
from typing import Any, NamedTuple

from pydantic import ValidationError

from trainer.config.recipe import Recipe

STEPS = 10
BATCH = 8
_DTMF = {
    **{"seconds": 0.128, "sample_rate": 8000, "mels": 32, "window": 0.04, "hop": 0.008},
    **{"lowest": 500, "highest": 1800},
}
_GPT = {"layers": 2, "heads": 2, "width": 16, "sequence_length": 24}

# What each kind of recipe has.
KINDS: dict[str, dict[str, Any]] = {
    "images": {"data": {"name": "synthetic", "image_size": 8, "samples": 44, "classes": 4}},
    "digits": {"data": {"name": "digits", "limit": 50}},
    "folder": {
        "data": {
            **{"name": "folder", "path": "pictures", "image_size": 16},
            **{"on_corrupt": "skip", "corrupt_budget": 0.5},
        }
    },
    "audio": {"task": "audio", "data": {"name": "dtmf", "limit": 44}, "audio": _DTMF},
    "boxes": {
        "task": "detection",
        "data": {"name": "coco", "path": "coco", "image_size": 48, "eval_batch_size": 8},
        "detection": {"max_boxes": 8},
    },
    "language": {"task": "language", "data": {"name": "stdlib", "limit": 60}, "language": _GPT},
    "documents": {
        "task": "language",
        "data": {"name": "stdlib", "limit": 60},
        "language": {**_GPT, "text": "packed"},
    },
    "conversations": {
        "task": "language",
        "data": {"name": "conversations", "path": "talks.jsonl"},
        "model": {"name": "hf/llama"},
        "language": {"sequence_length": 64},
    },
    "spoiled": {"task": "spoiled.py", "anomaly": {"nonfinite": "skip"}},
    "halves": {"task": "halves.py"},
}

_ANY: dict[str, list[Any]] = {
    "seed": [0, 7, 2**40],
    "data.last_batch": ["cross", "drop", "weighted"],
    "precision.mode": ["fp32", "bf16", "fp16"],
    "precision.initial_scale": [2.0**10, 2.0**30],
    "ema.decay": [0.9, 0.99],
    "ema.every": [1, 3],
    "evaluation.every": ["1 epoch", "4 steps", "end"],
    "evaluation.patience": [0, 2],
    "parallel.compress": ["none", "bf16"],
    "parallel.sync_batchnorm": [False, True],
    "anomaly.nonfinite": ["stop", "skip", "off"],
    "log.every": [1, 1, 2, 5],
    "log.to": [["jsonl"], ["jsonl"], ["jsonl", "tensorboard"]],
    "checkpoint.every": [0, 1, 3, 4],
    "checkpoint.minutes": [0],
    "checkpoint.keep": [1, 3],
    "checkpoint.best": [True, False],
}
_BLOCKS: dict[str, list[Any]] = {"memory.checkpointing": ["none", "blocks"]}
_OPTIM: dict[str, list[Any]] = {
    "optim.name": ["sgd", "adamw", "muon"],
    "optim.lr": [0.002, 0.01],
    "optim.schedule": ["cosine", "one-cycle", "step", "wsd", "constant"],
    "optim.warmup_steps": [0, 3, 0.2],
    "optim.weight_decay": [0.0, 0.1],
    "optim.layer_decay": [1.0, 0.8],
    "optim.max_grad_norm": [0.0, 0.5],
}
_MODEL: dict[str, list[Any]] = {
    **_BLOCKS,
    "model.norm": ["batch", "group"],
    "model.freeze": [["stem*"]],
    "model.channels_last": [False, True],
}
_DROPS: dict[str, list[Any]] = {"model.dropout": [0.0, 0.2], "regularization.label_smoothing": [0.0, 0.1]}
_IMAGES: dict[str, list[Any]] = {
    **_MODEL,
    **_DROPS,
    "data.augment": ["none", "flip", "crop", "affine"],
    "data.jitter": [0.0, 0.3],
    "data.policy": ["none", "randaugment", "trivialaugment"],
    "data.policy_group": [1, 3],
    "regularization.mixup": [0.0, 0.2],
    "regularization.cutmix": [0.0, 1.0],
    "regularization.stochastic_depth": [0.0, 0.3],
}
_LORA = {"rank": 2, "alpha": 4.0}
_TEXT: dict[str, list[Any]] = {
    **_BLOCKS,
    "language.dropout": [0.0, 0.1],
    "language.positions": ["rotary", "learned"],
    "language.norm": ["rms", "layer"],
    "language.mlp": ["swiglu", "gelu"],
    "language.bias": [False, True],
}

# Keys that a recipe of a kind may have, with their values.
POOLS: dict[str, dict[str, list[Any]]] = {
    "images": {**_ANY, **_OPTIM, **_IMAGES, "data.limit": [30]},
    "digits": {**_ANY, **_OPTIM, **_IMAGES},
    "folder": {
        **_ANY,
        **_OPTIM,
        **_IMAGES,
        "data.on_corrupt": ["skip", "quarantine"],
        "data.crop_area": [[0.3, 1.0]],
        "data.exif_orientation": ["apply", "ignore"],
        "data.start_method": [
            "fork"
        ],  # `evaluate` runs in a fork of the test, whose script no forkserver may import
    },
    "audio": {
        **_ANY,
        **_OPTIM,
        **_MODEL,
        **_DROPS,
        "audio.time_masks": [1, 2],
        "audio.time_mask": [3],
        "audio.frequency_masks": [1],
        "audio.frequency_mask": [3],
    },
    "boxes": {
        **_ANY,
        **_OPTIM,
        **_MODEL,
        "detection.flip": [0.5],
        "detection.scale": [[0.7, 1.4]],
        "detection.mosaic": [0.5],
        "data.name": ["digits-canvas"],
        "data.jitter": [0.3],
    },
    "language": {
        **_ANY,
        **_OPTIM,
        **_TEXT,
        "data.name": ["stdlib", "tokens", "text"],
        "language.stride": [7],
    },
    "documents": {
        **_ANY,
        **_OPTIM,
        **_TEXT,
        "language.text": ["packed", "padded"],
        "language.buckets": [3],
    },
    "conversations": {
        **_ANY,
        **_OPTIM,
        **_BLOCKS,
        "language.text": ["packed", "padded"],
        "language.learn": ["completions", "last", "all"],
        "language.prompts": [["what is two"]],
        "language.answer_tokens": [4],
        "model.lora": [_LORA, {**_LORA, "targets": ["*.q_proj", "lm_head"]}],
        "model.freeze": [["*.mlp.*"]],
    },
    "spoiled": {**_ANY, **_OPTIM, "anomaly.nonfinite": ["skip", "skip", "skip", "stop"], "data.limit": [35]},
    "halves": {**_ANY, "optim.max_grad_norm": [0.5], "data.limit": [30]},
}
_COMPILED = 0.1  # fraction of the recipes of images: compiling takes ten times as long as all else
_WEIGHTS: dict[str, Any] = {
    "digits": {"3": 5, "7": 0.5},
    "folder": {"c": 4},
    "audio": {"1": 3, "#": 0.5},
    "images": "balanced",
}  # of classes, by kind

_FORMATS = {
    "images": ["safetensors", "onnx", "torch-export", "torch-export"],
    "language": ["safetensors", "torch-export"],
    "conversations": ["safetensors", "transformers", "peft"],
    "spoiled": ["safetensors", "onnx"],
}


class Attempt(NamedTuple):
    """One start of a run.

    Attributes:
        end: How it ends: `done` (by itself), `stop` (--stop-after), `kill` (SIGKILL of a rank), `raise` (an
            error of a hook), `term` (SIGTERM to the launcher) or `restart` (SIGKILL, with --max-restarts).
        step: At which step.
        ranks: Number of ranks.
        workers: Loader workers of each rank.
    """

    end: str
    step: int
    ranks: int
    workers: int


class Case(NamedTuple):
    """A random recipe and what is done with it; plain data, as JSON holds it.

    Attributes:
        seed: Seed that it was drawn by.
        kind: A key of `KINDS`.
        recipe: Sections of the recipe, as a YAML file has them.
        ranks: Number of ranks of the run that nothing disturbs.
        attempts: The attempts of the run that is disturbed.
        commands: What follows: `evaluate`, `verify`, `report`, `extend`, `from` or `export FORMAT`.
    """

    seed: int
    kind: str
    recipe: dict[str, Any]
    ranks: int
    attempts: list[Attempt]
    commands: list[str]


def draw(seed: int) -> Case:
    """Draws a case.

    Ten seeds in a row have all kinds. A seed that 3 divides has one micro-batch a step, on one rank.

    Args:
        seed: 0 or more.
    """
    of_seed = random.Random(f"recipe {seed}")
    kind = list(KINDS)[seed % len(KINDS)]
    while True:  # until the keys go together
        case = _drawn(of_seed, seed, kind, alone=seed % 3 == 0)
        try:
            Recipe.model_validate(case.recipe)
        except ValidationError:
            continue
        return case


def _drawn(of_seed: random.Random, seed: int, kind: str, alone: bool) -> Case:
    recipe: dict[str, Any] = {"epochs": 5, "max_steps": STEPS}
    _put(recipe, "parallel.threads", 1)
    _put(recipe, "data.global_batch_size", BATCH)
    _put(recipe, "data.micro_batch_size", BATCH if alone else of_seed.choice([2, 2, 4]))
    _put(recipe, "data.workers", 0)
    if kind in ("images", "digits", "folder", "audio", "boxes"):
        _put(recipe, "model.width", 4)
    for name, section in KINDS[kind].items():
        old = recipe.get(name)
        recipe[name] = {**(old or {}), **section} if isinstance(section, dict) else section
    pool = POOLS[kind]
    ranks = 1 if alone else of_seed.choice([1, 2, 2])
    for key in of_seed.sample(sorted(pool), of_seed.randint(4, min(14, len(pool)))):
        _put(recipe, key, of_seed.choice(pool[key]))
    if ranks > 1 and of_seed.random() < 0.5 and kind != "halves":  # its optimizer takes whole parameters
        _put(recipe, "parallel.strategy", "fsdp")
    elif of_seed.random() < 0.4:
        _put(recipe, "parallel.reduction", "tree")
    if kind in _WEIGHTS and of_seed.random() < 0.4:
        _put(recipe, "data.class_weights", of_seed.choice(["balanced", _WEIGHTS[kind]]))
    if kind == "conversations" and of_seed.random() < 0.6:
        _put(recipe, "data.mix", {"talks.jsonl": 3, "more.jsonl": 1})
    _tidy(recipe, ranks)
    several = not alone and recipe["parallel"].get("reduction") == "tree"
    attempts = _attempts(of_seed, [1] if kind == "boxes" else [1, 1, 2, 3], ranks, several)
    if kind == "images" and of_seed.random() < _COMPILED:
        recipe["compile"] = {"mode": "default", "scope": "blocks"}
        attempts = [Attempt("stop", 4, ranks, 0), Attempt("done", 0, ranks, 0)]
    if any(one.end not in ("stop", "done") for one in attempts) or of_seed.random() < 0.2:
        recipe["hooks"] = {"use": ["cut.py:Cut"]}
    commands = [] if "compile" in recipe else _commands(of_seed, kind, recipe)
    commands = commands[:1] if kind == "boxes" else commands  # a command takes seconds
    return Case(seed, kind, recipe, ranks, attempts, commands)


def _put(recipe: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    into = recipe
    for part in section.split(".") if section else ():
        into = into.setdefault(part, {})
    into[name] = value


def _tidy(recipe: dict[str, Any], ranks: int) -> None:
    """Takes out what a start refuses beside the rest, and gives data their paths."""
    data, parallel, optim = recipe["data"], recipe["parallel"], recipe.get("optim", {})
    if ranks == 1:
        for key in ("compress", "sync_batchnorm"):
            parallel.pop(key, None)
    if optim.get("schedule") == "step":
        optim["milestones"] = [0.5, 1.5]
    if recipe.get("precision", {}).get("mode") != "fp16":
        recipe.get("precision", {}).pop("initial_scale", None)
    if data.get("name") == "digits-canvas":
        data.pop("path")
        data.update(image_size=96, limit=28)
    if data.get("name") in ("tokens", "text"):
        data["path"] = str(data["name"])
    if data.get("last_batch") == "weighted" and "language" not in recipe:  # padding and BatchNorm
        if recipe.get("task", "").endswith(".py"):
            data["last_batch"] = "drop"
        else:
            recipe["model"]["norm"] = "group"
    if "mix" in data:
        data.pop("path", None)


def _attempts(of_seed: random.Random, stops: list[int], ranks: int, several: bool) -> list[Attempt]:
    """Draws stops, the last of which may be one that nobody planned, and how the run ends.

    Args:
        of_seed: What draws.
        stops: Of which their number is drawn.
        ranks: Number of ranks of each.
        several: Whether it may be another number each time.
    """
    steps = sorted(of_seed.sample(range(1, STEPS - 2), of_seed.choice(stops)))
    ends = ["stop"] * (len(steps) - 1) + [of_seed.choice(["stop", "term", "kill", "raise", "restart"])]
    last = [] if ends[-1] == "restart" else [("done", 0)]
    return [
        Attempt(end, step, of_seed.choice([1, 2]) if several else ranks, of_seed.choice([0, 0, 0, 1, 2]))
        for end, step in [*zip(ends, steps, strict=True), *last]
    ]


def _commands(of_seed: random.Random, kind: str, recipe: dict[str, Any]) -> list[str]:
    formats = _FORMATS.get({"digits": "images", "folder": "images", "documents": "language"}.get(kind, kind))
    formats = formats or ["safetensors"]
    if kind == "conversations":
        formats = ["safetensors", "peft" if recipe["model"].get("lora") else "transformers"]
    chosen = formats[0] if of_seed.random() < 0.7 else of_seed.choice(formats)
    chances = {"evaluate": 0.7, "verify": 0.4, f"export {chosen}": 0.5, "extend": 0.2, "from": 0.2}
    if recipe.get("checkpoint", {}).get("minutes") == 0:  # its last step may have no checkpoint
        chances = {**chances, "extend": 0.0, "from": 0.0}
    return [name for name, chance in {**chances, "report": 0.2}.items() if of_seed.random() < chance]
