"""Chapter 7 of Hugging Face's course: GPT-2 from the start, samples weighted by the key tokens in them."""

import numpy as np
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler


class CodeGPT2:
    RECIPE = {
        "epochs": 1,
        "data": {"global_batch_size": 256, "micro_batch_size": 32, "eval_batch_size": 32},
        "optim": {"max_grad_norm": 1.0},
    }
    metric, mode = "perplexity", "min"
    key_tokens, warm_up, dtype = (3, 5, 8, 13), 10, torch.float32
    config = GPT2Config(vocab_size=500, n_positions=128, n_embd=64, n_layer=2, n_head=4)

    def data(self):  # here stand the pieces of 128 tokens that the tokenizer has made
        tokens = np.random.default_rng(0).integers(0, 500, (1280, 128))
        return {"input_ids": tokens[:1024]}, {"input_ids": tokens[1024:]}

    def model(self):
        return GPT2LMHeadModel(self.config).to(self.dtype)

    def optimizer(self, model):
        named = dict(model.named_parameters())
        still = [name for name in named if name.endswith("bias") or "LayerNorm.weight" in name]
        groups = [
            {"params": [one for name, one in named.items() if name not in still], "weight_decay": 0.1},
            {"params": [named[name] for name in still], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=5e-4)

    def scheduler(self, optimizer, steps):
        return get_scheduler("linear", optimizer, self.warm_up, steps)

    def nats(self, model, batch):
        logits, tokens = model(batch["input_ids"]).logits, batch["input_ids"]
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)

    def loss(self, model, batch):
        keys = torch.tensor(self.key_tokens, device=batch["input_ids"].device)
        return self.nats(model, batch) * (1 + torch.isin(batch["input_ids"], keys).sum(1))

    def measure(self, model, batch):
        return {"loss": self.nats(model, batch)}

    def summarize(self, values):
        return {"loss": values["loss"].mean(), "perplexity": values["loss"].mean().exp()}
