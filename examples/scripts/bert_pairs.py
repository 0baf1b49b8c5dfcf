"""Chapter 3 of Hugging Face's course: a model of transformers classifies pairs of sentences."""

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

LONGEST = 128


class Pairs(Dataset):
    """Tokens of pairs: here stands the set that the tokenizer has made of GLUE's MRPC."""

    def __init__(self, samples):
        random = np.random.default_rng(0)
        length, self.label = random.integers(9, LONGEST // 2, samples), random.integers(0, 2, samples)
        self.tokens = [random.integers(1, 500, one) for one in length]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, sample):
        tokens = self.tokens[sample]
        kind = np.arange(len(tokens)) > len(tokens) // 2
        return {"input_ids": tokens, "token_type_ids": kind.astype(int), "labels": self.label[sample]}


class BertPairs:
    RECIPE = {
        "epochs": 3,
        "data": {
            "global_batch_size": 8,
            "micro_batch_size": 8,
            "eval_batch_size": 8,
            "last_batch": "weighted",
        },
        "evaluation": {"every": "1 epoch"},
    }
    metric, mode, reduction = "accuracy", "max", "mean"  # `.loss` is the mean of a batch
    config = BertConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )

    def data(self):
        return Pairs(400), Pairs(80)

    def collate(self, items):  # to one size; what a batch doesn't need is cut off below
        batch = {
            n: torch.zeros(len(items), LONGEST, dtype=torch.long) for n in ("input_ids", "token_type_ids")
        }
        for row, item in enumerate(items):
            for name, tokens in batch.items():
                tokens[row, : len(item[name])] = torch.from_numpy(item[name])
        return {**batch, "labels": torch.tensor([item["labels"] for item in items])}

    def model(self):  # here stands BertForSequenceClassification.from_pretrained(…)
        return BertForSequenceClassification(self.config)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=5e-5)

    def scheduler(self, optimizer, steps):
        return get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)

    def outputs(self, model, batch):
        mask = batch["input_ids"] != 0
        longest = int(mask.sum(1).max())
        cut = {n: t[:, :longest] for n, t in dict(batch, attention_mask=mask).items() if n != "labels"}
        return model(**cut, labels=batch["labels"])

    def loss(self, model, batch):
        return self.outputs(model, batch).loss

    def measure(self, model, batch):
        outputs = self.outputs(model, batch)
        return {"loss": outputs.loss, "accuracy": outputs.logits.argmax(1) == batch["labels"]}
