"""A random recipe by its seed: sections, number of ranks, how its attempts end, and which commands follow."""

import random
from typing import Any, NamedTuple

from pydantic import ValidationError

from trainer.config.recipe import Recipe

STEPS = 10
BATCH = 8
_DTMF = {"seconds": 0.128, "sample_rate": 8000, "mels": 32, "window": 0.04, "hop": 0.008}
_DTMF |= {"lowest": 500, "highest": 1800}
_GPT = {"layers": 2, "heads": 2, "width": 16, "sequence_length": 24}
_FOLDER = {"name": "folder", "path": "pictures", "image_size": 16}
_FOLDER |= {"on_corrupt": "skip", "corrupt_budget": 0.5}
_COCO = {"name": "coco", "path": "coco", "image_size": 48, "eval_batch_size": 8}
_STDLIB = {"name": "stdlib", "limit": 60}
_TALKS = {"name": "conversations", "path": "talks.jsonl"}

# What each kind of recipe has.
KINDS: dict[str, dict[str, Any]] = {
    "images": {"data": {"name": "synthetic", "image_size": 8, "samples": 44, "classes": 4}},
    "digits": {"data": {"name": "digits", "limit": 50}},
    "folder": {"data": _FOLDER},
    "audio": {"task": "audio", "data": {"name": "dtmf", "limit": 44}, "audio": _DTMF},
    "boxes": {"task": "detection", "data": _COCO, "detection": {"max_boxes": 8}},
    "language": {"task": "language", "data": _STDLIB, "language": _GPT},
    "documents": {"task": "language", "data": _STDLIB, "language": {**_GPT, "text": "packed"}},
    "conversations": {
        **{"task": "language", "data": _TALKS, "model": {"name": "hf/llama"}},
        **{"language": {"sequence_length": 64}},
    },
    "spoiled": {"task": "spoiled.py", "anomaly": {"nonfinite": "skip"}},
    "halves": {"task": "halves.py"},
}


Pool = dict[str, list[Any]]  # keys that a recipe may have, with their values


def _in(section: str, **keys: list[Any]) -> Pool:
    return {f"{section}.{name}": values for name, values in keys.items()}


_ANY = {
    "seed": [0, 7, 2**40],
    **_in("data", last_batch=["cross", "drop", "weighted"]),
    **_in("precision", mode=["fp32", "bf16", "fp16"], initial_scale=[2.0**10, 2.0**30]),
    **_in("ema", decay=[0.9, 0.99], every=[1, 3]),
    **_in("evaluation", every=["1 epoch", "4 steps", "end"], patience=[0, 2]),
    **_in("parallel", compress=["none", "bf16"], sync_batchnorm=[False, True]),
    **_in("anomaly", nonfinite=["stop", "skip", "off"]),
    **_in("log", every=[1, 1, 2, 5], to=[["jsonl"], ["jsonl"], ["jsonl", "tensorboard"]]),
    **_in("checkpoint", every=[0, 1, 3, 4], minutes=[0], keep=[1, 3], best=[True, False]),
}
_BLOCKS = _in("memory", checkpointing=["none", "blocks"])
_SCHEDULES = ["cosine", "one-cycle", "step", "wsd", "constant"]
_MOST = {
    **_ANY,
    **_in("optim", name=["sgd", "adamw", "muon"], lr=[0.002, 0.01], schedule=_SCHEDULES),
    **_in("optim", warmup_steps=[0, 3, 0.2], weight_decay=[0.0, 0.1], layer_decay=[1.0, 0.8]),
    **_in("optim", max_grad_norm=[0.0, 0.5]),
}
_MODEL = {
    **{**_MOST, **_BLOCKS},
    **_in("model", norm=["batch", "group"], freeze=[["stem*"]], channels_last=[False, True]),
}
_DROPS = {**_in("model", dropout=[0.0, 0.2]), **_in("regularization", label_smoothing=[0.0, 0.1])}
_POLICIES = ["none", "randaugment", "trivialaugment"]
_IMAGES = {
    **{**_MODEL, **_DROPS},
    **_in("data", augment=["none", "flip", "crop", "affine"], jitter=[0.0, 0.3]),
    **_in("data", policy=_POLICIES, policy_group=[1, 3]),
    **_in("regularization", mixup=[0.0, 0.2], cutmix=[0.0, 1.0], stochastic_depth=[0.0, 0.3]),
}
_LORA = {"rank": 2, "alpha": 4.0}
_TEXT = {
    **{**_MOST, **_BLOCKS},
    **_in("language", dropout=[0.0, 0.1], positions=["rotary", "learned"], norm=["rms", "layer"]),
    **_in("language", mlp=["swiglu", "gelu"], bias=[False, True]),
}
POOLS: dict[str, Pool] = {
    "images": {**_IMAGES, **_in("data", limit=[30])},
    "digits": _IMAGES,
    "folder": {
        **_IMAGES,
        **_in("data", on_corrupt=["skip", "quarantine"], crop_area=[[0.3, 1.0]]),
        # `evaluate` runs in a fork of the test, whose script no forkserver may import
        **_in("data", exif_orientation=["apply", "ignore"], start_method=["fork"]),
    },
    "audio": {
        **{**_MODEL, **_DROPS},
        **_in("audio", time_masks=[1, 2], time_mask=[3], frequency_masks=[1], frequency_mask=[3]),
    },
    "boxes": {
        **_MODEL,
        **_in("detection", flip=[0.5], scale=[[0.7, 1.4]], mosaic=[0.5]),
        **_in("data", name=["digits-canvas"], jitter=[0.3]),
    },
    "language": {**_TEXT, **_in("data", name=["stdlib", "tokens", "text"]), **_in("language", stride=[7])},
    "documents": {**_TEXT, **_in("language", text=["packed", "padded"], buckets=[3])},
    "conversations": {
        **{**_MOST, **_BLOCKS},
        **_in("language", text=["packed", "padded"], learn=["completions", "last", "all"]),
        **_in("language", prompts=[["what is two"]], answer_tokens=[4]),
        **_in("model", lora=[_LORA, {**_LORA, "targets": ["*.q_proj", "lm_head"]}], freeze=[["*.mlp.*"]]),
    },
    "spoiled": {
        **_MOST,
        **_in("anomaly", nonfinite=["skip", "skip", "skip", "stop"]),
        **_in("data", limit=[35]),
    },
    "halves": {**_ANY, **_in("optim", max_grad_norm=[0.5]), **_in("data", limit=[30])},
}
_COMPILED = 0.1  # fraction of the recipes of images: compiling takes ten times as long as all else
# Of classes, by kind.
_WEIGHTS: dict[str, Any] = {"images": "balanced", "folder": {"c": 4}}
_WEIGHTS |= {"digits": {"3": 5, "7": 0.5}, "audio": {"1": 3, "#": 0.5}}

_FORMATS = {
    "images": ["safetensors", "onnx", "torch-export", "torch-export"],
    "language": ["safetensors", "torch-export"],
    "spoiled": ["safetensors", "onnx"],
}


class Attempt(NamedTuple):
    """One start of a run, its number of ranks, and the loader workers of each.

    It ends, at a step, by itself (`done`), --stop-after (`stop`), SIGKILL of a rank (`kill`), an error of a
    hook (`raise`), SIGTERM to the launcher (`term`), or SIGKILL with --max-restarts (`restart`).
    """

    end: str
    step: int
    ranks: int
    workers: int


class Case(NamedTuple):
    """A random recipe and what is done with it; plain data, as JSON holds it.

    Its sections are those of a YAML file. `ranks` has the run that nothing disturbs, `attempts` the one that
    is; `commands` follow: `evaluate`, `verify`, `report`, `extend`, `from` or `export FORMAT`.
    """

    seed: int
    kind: str
    recipe: dict[str, Any]
    ranks: int
    attempts: list[Attempt]
    commands: list[str]


def draw(seed: int) -> Case:
    """Draws a case: ten seeds in a row have all kinds, each third has one micro-batch a step, on one rank."""
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
    """Draws as many stops as one of `stops`, the last of which may be one that nobody planned, and the end.

    `several`: the number of ranks may be another one each time.
    """
    steps = sorted(of_seed.sample(range(1, STEPS - 2), of_seed.choice(stops)))
    ends = ["stop"] * (len(steps) - 1) + [of_seed.choice(["stop", "term", "kill", "raise", "restart"])]
    last = [] if ends[-1] == "restart" else [("done", 0)]
    return [
        Attempt(end, step, of_seed.choice([1, 2]) if several else ranks, of_seed.choice([0, 0, 0, 1, 2]))
        for end, step in [*zip(ends, steps, strict=True), *last]
    ]


def _commands(of_seed: random.Random, kind: str, recipe: dict[str, Any]) -> list[str]:
    like = {"digits": "images", "folder": "images", "documents": "language"}
    formats = _FORMATS.get(like.get(kind, kind), ["safetensors"])
    if kind == "conversations":
        formats = ["safetensors", "peft" if recipe["model"].get("lora") else "transformers"]
    chosen = formats[0] if of_seed.random() < 0.7 else of_seed.choice(formats)
    chances = {"evaluate": 0.7, "verify": 0.4, f"export {chosen}": 0.5, "extend": 0.2, "from": 0.2}
    if recipe.get("checkpoint", {}).get("minutes") == 0:  # its last step may have no checkpoint
        chances = {**chances, "extend": 0.0, "from": 0.0}
    return [name for name, chance in {**chances, "report": 0.2}.items() if of_seed.random() < chance]
