"""Goes on with a model by TRL's DPO: each row's answer is preferred to the next row's."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model, rows, out = sys.argv[1:4]
talks = [json.loads(line).get("messages", []) for line in Path(rows).read_text().splitlines()]
talks = [talk for talk in talks if [one["role"] for one in talk] == ["user", "assistant"]]
pairs = [
    {"prompt": talk[:1], "chosen": talk[1:], "rejected": other[1:]}
    for talk, other in zip(talks, talks[1:] + talks[:1], strict=True)
]
config = DPOConfig(
    output_dir=out,
    max_steps=int(sys.argv[4]) if len(sys.argv) > 4 else 20,
    per_device_train_batch_size=len(pairs),
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    bf16=torch.cuda.is_available(),
    use_cpu=not torch.cuda.is_available(),
    gradient_checkpointing=False,
)
trainer = DPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
    args=config,
    train_dataset=Dataset.from_list(pairs),
    processing_class=AutoTokenizer.from_pretrained(model),
)
trainer.train()
trainer.save_model(out)
steps = [row for row in trainer.state.log_history if "rewards/accuracies" in row]
print(
    f"{len(pairs)} pairs: loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}, chosen is preferred in "
    f"{steps[-1]['rewards/accuracies']:.0%}"
)
