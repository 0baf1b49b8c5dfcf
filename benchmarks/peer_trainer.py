"""A small GPT-2 by transformers' Trainer, for the bench `peers`: `peer_trainer.py FOLDER STEPS SEED`.

The Trainer is used as its documentation does, at its own defaults. Model, optimizer, rates, batches and the
share of held-out text are those of the recipe gpt-char. FOLDER/text.txt is cut into blocks of 64 characters,
as transformers' own `run_clm.py` cuts texts; FOLDER/out gets the checkpoint.
"""

import math
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

_BLOCK = 64


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of tokens (64,), each with itself as label: the model shifts them."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.rows = tokens[: len(tokens) // _BLOCK * _BLOCK].view(-1, _BLOCK)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


def main(folder: Path, steps: int, seed: int) -> None:
    """Trains, evaluates at the end, saves and prints the loss."""
    text = (folder / "text.txt").read_text()
    number = {letter: count for count, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[letter] for letter in text])
    cut = int(len(tokens) * 0.9)
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(number),
        n_positions=_BLOCK,
        n_layer=4,
        n_head=4,
        n_embd=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    settings = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=steps,
        seed=seed,
        per_device_train_batch_size=12,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(steps / 20),
        adam_beta2=0.99,
        weight_decay=0.1,
        eval_strategy="steps",
        eval_steps=steps,
        save_steps=steps,
        logging_steps=50,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model, settings, train_dataset=Blocks(tokens[:cut]), eval_dataset=Blocks(tokens[cut:]))
    trainer.train()
    print(f"loss on all held-out text {trainer.state.log_history[-2]['eval_loss']:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
