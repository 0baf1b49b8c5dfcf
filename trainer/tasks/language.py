"""Language: text as tokens, each predicted from those before it."""

import math
import platform
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from typing_extensions import assert_never

from trainer.config.data import DataConfig
from trainer.config.model import ModelConfig
from trainer.config.models import HF, opens
from trainer.config.registry import named
from trainer.config.tasks import LanguageConfig
from trainer.data.batch import Batch
from trainer.data.builtin.stdlib import stdlib_text
from trainer.data.dataset import LENGTH, NUM_ITEMS, ArrayDataset, Arrays, Dataset
from trainer.data.formats.arrow import arrow_text, split_text, splits
from trainer.data.formats.chat import Chat
from trainer.data.formats.conversations import RowSplit, splits_of
from trainer.data.formats.documents import SEGMENT, TARGETS, StreamDataset, packed, padded
from trainer.data.formats.text import (
    Text,
    about_or,
    character_text,
    check_tokens,
    file_text,
    random_text,
    text_about,
)
from trainer.data.formats.tokenized import tokenized
from trainer.data.formats.tokens import TOKENS, TokenDataset, TokenFile, inputs_and_targets
from trainer.data.sampling.plan import Plan
from trainer.data.sources import check_folder
from trainer.errors import BadInputError
from trainer.models.head_loss import IGNORED, in_pieces
from trainer.models.hf_files import hf_config_hash, hf_vocabulary
from trainer.rng import Ints
from trainer.tasks.conversations import check_prompts, concatenate_sets, local_path, open_chat

_RANDOM_VOCABULARY = 256
_LARGEST_LOSS = 700.0  # whose exponential is a number


class Language:
    """The next token, by cross entropy."""

    uniforms = 0
    lower_is_better = True
    beside = ("token_accuracy",)

    _name = "auto"
    chat: Chat | None = None  # of conversations
    _told: tuple[str, ...] = ()

    def __init__(self, data: DataConfig, model: ModelConfig, config: LanguageConfig, seed: int) -> None:
        """Opens the text.

        Raises:
            BadInputError: If it isn't there, or holds a token that the model doesn't know.
        """
        self._data, self._config, self._seed = data, config, seed
        self._name = model.name
        self.train_data: Dataset
        self.evaluation_data: Dataset
        if config.stride is not None and (config.text != "stream" or data.name == "tokens"):
            raise BadInputError(
                "language.stride is for language.text=stream of what is held in memory; leave it out"
            )
        self.chat = open_chat(data, model, config)
        path = _path(data)
        self._files: list[tuple[Path, str]] = []
        if data.name == "tokens" and config.text == "stream":
            self._about = self._open_files(path)
        elif self.chat is not None:
            paths = [path] if data.mix is None else [local_path(Path(one), "data.mix") for one in data.mix]
            sets = [splits_of(one, data.eval_split, data.input_column) for one in paths]
            read = [self._conversations(one) for one, _ in sets]
            self._about, self._told = read[0][1], tuple(line for one in read for line in one[2])
            self.train_data = concatenate_sets([one[0] for one in read], labeled=data.mix is not None)
            self.evaluation_data = concatenate_sets([self._conversations(held)[0] for _, held in sets])
        else:
            learned, held = _texts(data, path, config, seed)
            self._about = learned
            self.train_data = self._samples(learned, measured=False)
            self.evaluation_data = self._samples(held, measured=True)
        # Token files that aren't held are looked through by `check`.
        if not self._files and self._about.vocabulary > (config.vocabulary or self._about.vocabulary):
            raise BadInputError(
                f"language.vocabulary={config.vocabulary}, but this text has {self._about.vocabulary} "
                "tokens: leave it out, or make it larger"
            )
        self._vocabulary = config.vocabulary or self._about.vocabulary
        if model.name.startswith(HF):
            # Tokenizers may know more tokens than their model, such as Gemma 3's of pictures.
            used = self._vocabulary if self.chat is None else 0
            self._vocabulary = hf_vocabulary(model.name, used)
        self._bytes = self._about.tokenizer == "bytes"
        self.metric = "bits_per_byte" if self._bytes else "loss"

    def check(self) -> None:
        """Looks for tokens that the model doesn't know, in files that aren't held in memory.

        Raises:
            BadInputError: Names the first one and its sample.
        """
        for file, dtype in self._files:
            check_tokens(file, self._config.sequence_length, dtype, self._vocabulary)

    def more_data(self, data: DataConfig, split: str | None) -> Dataset:
        """See `Extensible`."""
        config, about, path = self._config, self._about, _path(data)
        if data.name == "tokens":
            file = path / f"{split or 'val'}.bin"
            beside = about_or(file, config.dtype, config.vocabulary)
            if config.text == "stream":
                text = _without_tokens(beside, self._vocabulary)
            elif beside is None:
                raise BadInputError(f"{file}: no {file.name}.json says where documents end; tokenize again")
            else:
                text = _documents(file, beside, config, self._vocabulary)
        elif data.name == "text":
            text = character_text(path, about.characters or None)[1]
        elif self.chat is not None:
            return self._conversations(splits_of(path, data.eval_split, data.input_column)[1])[0]
        elif data.name == "hf":
            text = split_text(splits(path, data.eval_split)[1], data.input_column or "text")
        else:
            text = _texts(data, path, config, self._seed)[1]
        for what in ("tokenizer", "tokenizer_sha256", "vocabulary", "end", "characters"):
            here, there = getattr(text, what), getattr(about, what)
            if here != there:
                shown = "" if what == "characters" else f" ({what} {here}, and the model's {there})"
                raise BadInputError(f"is of another tokenizer than the model's data{shown}")
        if data.name == "tokens" and config.text == "stream":
            return self._token_file(file, beside, measured=True)
        return self._samples(text, measured=True)

    def describe(self) -> Mapping[str, Any]:
        """Vocabulary, tokenizer and longest text of the model; and what share of training is padding."""
        about = self._about
        return {
            "vocabulary": self._vocabulary,
            "sequence_length": self._config.sequence_length,
            "tokenizer": about.tokenizer,
            "tokenizer_sha256": about.tokenizer_sha256,
            "characters": about.characters,
            "end_of_document": about.end,
            "text": self._config.text,
            "padding": self.padding,
            **({"model_config": hf_config_hash(self._name)} if self._name.startswith(HF) else {}),
            **({"chat_sha256": self.chat.sha256, "learn": self._config.learn} if self.chat else {}),
            **({"turns": self._config.turns} if self._config.turns != "together" else {}),
        }

    def model(self) -> nn.Module:
        """A new model."""
        if self._name.startswith(HF):
            from trainer.models.hf import hf_model  # the library takes seconds

            model: nn.Module = hf_model(self._name, self._config.sequence_length)
        else:
            model = named(opens(self._name, "language") or "")(self._config, self._vocabulary)
        if self.chat is not None:
            check_prompts(self.chat, self._config.prompts, model)
        return model

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Tokens int64 (n, length), and for packed text the documents' numbers."""
        tokens, _, segment = self.given(batch)
        return (tokens,) if segment is None else (tokens, segment)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy in nats, summed over the valid tokens of the micro-batch."""
        tokens, targets, segment = self.given(batch)
        if getattr(model, "gives_loss", False) and in_pieces(tokens, self._vocabulary):
            loss: torch.Tensor = model(tokens, segment, targets)
            return loss
        logits = _exact(model, tokens, segment)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Loss in nats, summed over the tokens; and figures of each sample.

        These are how many of its tokens the model finds likeliest, of how many that count; bits and bytes;
        and its places and tokens.
        """
        metrics: dict[str, torch.Tensor] = {}
        tokens, targets, segment = self.given(batch)
        counts = targets != IGNORED
        if not self._bytes and getattr(model, "gives_loss", False) and in_pieces(tokens, self._vocabulary):
            right = torch.zeros_like(counts)
            metrics["loss"] = model(tokens, segment, targets, right)
        else:
            logits = _exact(model, tokens, segment)
            right = logits.argmax(1).view_as(targets) == targets
            sums = "none" if self._bytes else "sum"
            nats = F.cross_entropy(logits, targets.flatten(), reduction=sums, ignore_index=IGNORED)
            metrics["loss"] = nats.view_as(targets).sum() if self._bytes else nats
        metrics["right"], metrics["counted"] = right.sum(1), counts.sum(1)
        if self._bytes:
            # The token that ends a document is no byte of it: nanochat's `evaluate_bpb` leaves it out, too.
            of_bytes = counts & (targets != self._about.end)
            metrics["bits"] = (nats.view_as(targets).double() * of_bytes).sum(1) / math.log(2)
            metrics["bytes"] = of_bytes.sum(1)
        if self._config.text != "stream":
            metrics["places"] = torch.full((len(targets),), targets.shape[1], device=targets.device)
            metrics["tokens"] = batch.fields.get(LENGTH, batch.fields[NUM_ITEMS])
        return metrics

    def summarize(self, rows: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Shares of tokens that are found and of places that are padding, and bits per byte of text."""
        figures = {"token_accuracy": float(rows["right"].sum()) / max(1, int(rows["counted"].sum()))}
        if "bits" in rows:
            figures["bits_per_byte"] = float(rows["bits"].double().sum()) / max(1, int(rows["bytes"].sum()))
        if "places" in rows:
            figures["padding"] = 1 - float(rows["tokens"].sum()) / float(rows["places"].sum())
        return figures

    def derived(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Perplexity of each set, of a model of tokens: for bytes the field has bits."""
        losses = {} if self._bytes else {name: one for name, one in metrics.items() if name.endswith("loss")}
        return {
            f"{name.removesuffix('loss')}perplexity": math.inf if loss > _LARGEST_LOSS else math.exp(loss)
            for name, loss in losses.items()
        }

    def given(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Tokens and targets, int64 (n, length), targets that don't count being -100; and segments."""
        fields = batch.fields
        if TARGETS not in fields:
            tokens, targets = inputs_and_targets(fields[TOKENS])
        else:
            length = _cut(batch.longest, self._config)
            tokens, targets = (fields[name][:, :length].to(torch.int64) for name in (TOKENS, TARGETS))
        valid = None
        if NUM_ITEMS in fields and LENGTH not in fields:  # else the targets say which of them count
            valid = torch.arange(tokens.shape[1], device=tokens.device) < fields[NUM_ITEMS][:, None]
        if batch.weight is not None:
            real = (batch.weight > 0)[:, None]
            valid = real if valid is None else valid & real
        if valid is not None:
            targets = torch.where(valid, targets, IGNORED)
        return tokens, targets, fields.get(SEGMENT)

    def _conversations(self, split: RowSplit) -> tuple[ArrayDataset, Text, tuple[str, ...]]:
        """Samples of conversations, the text that they are of, and what is to be said of it."""
        assert self.chat is not None
        config = self._config
        text, left_out, notes = tokenized(
            split,
            self.chat,
            config.learn,
            config.sequence_length,
            config.turns == "each",
            self._data.corrupt_budget,
        )
        if self._name.startswith(HF):
            hf_vocabulary(self._name, int(text.tokens.max()) + 1)
        samples = self._samples(text, measured=True)
        assert isinstance(samples, ArrayDataset)
        samples.left_out = left_out
        return samples, text, notes

    def _samples(self, text: Text, measured: bool) -> Dataset:
        config, length = self._config, self._config.sequence_length
        if config.text == "stream":
            stride = None if measured else config.stride
            return StreamDataset(text.tokens, length, stride, whole=measured)
        if config.text == "packed":
            return packed(text, length)
        if config.text != "padded":
            assert_never(config.text)
        dataset = padded(text, length)
        assert dataset.arrays is not None
        lengths = _lengths(dataset.arrays)
        cuts = sorted({_cut(length, config) for length in range(1, config.sequence_length + 1)})
        last = np.searchsorted(lengths, cuts, "right")
        dataset.buckets = tuple(int(n) for n in np.diff(last, prepend=0) if n)
        return dataset

    def _open_files(self, folder: Path) -> Text:
        """Token files, read as they are needed; what they hold, without the tokens."""
        config = self._config
        files = [folder / "train.bin", folder / "val.bin"]
        abouts = [about_or(file, config.dtype, config.vocabulary) for file in files]
        _same_tokenizer(files, abouts)
        self._vocabulary = config.vocabulary or (abouts[0].vocabulary if abouts[0] else 0)
        self.train_data, self.evaluation_data = (
            self._token_file(file, about, measured)
            for file, about, measured in zip(files, abouts, (False, True), strict=True)
        )
        return _without_tokens(abouts[0], self._vocabulary)

    def _token_file(self, file: Path, about: TokenFile | None, measured: bool) -> TokenDataset:
        """A token file that is read as it is needed; what is measured, to its last token."""
        dtype = None if about else self._config.dtype
        dataset = TokenDataset(file, self._config.sequence_length, dtype, whole=measured)
        dataset.vocabulary = self._vocabulary  # it looks at what it reads, for who didn't look before
        self._files.append((file, str(dataset.fields[TOKENS].dtype)))
        return dataset

    @cached_property  # not before data.limit
    def padding(self) -> float:
        """The share of the places in the first epoch's batches that hold no token to be predicted."""
        arrays, length = self.train_data.arrays, self._config.sequence_length
        if self._config.text == "stream" or arrays is None:
            return 0.0
        num_items = _lengths(arrays)
        places = len(num_items) * length
        if buckets := getattr(self.train_data, "buckets", ()):
            size = min(self._data.micro_batch_size, len(num_items))
            plan = Plan(len(num_items), size, size, 1, "cross", self._seed, buckets=buckets)
            of_batches = num_items[plan.read(np.arange(len(num_items) // size)).sample]
            num_items = of_batches
            places = sum(_cut(int(longest), self._config) * size for longest in of_batches.max(1))
        return round(1 - float(num_items.sum()) / places, 6)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Lines on what the text is, and how much of it is padding."""
        text: tuple[str, ...] = ()
        if self._data.name == "stdlib":
            text = (f"text: the standard library of Python {platform.python_version()}, by bytes",)
        text += tuple(f"conversations: {line}" for line in self._told)
        if self._config.text == "stream":
            return text
        arrays = self.train_data.arrays
        assert arrays is not None
        full = 1 - float(_lengths(arrays).sum()) / (len(self.train_data) * self._config.sequence_length)
        line = f"text {self._config.text}: {self.padding:.1%} of the places are padding"
        if self._config.text == "padded":
            line += f" ({full:.1%} if every sample were padded to {self._config.sequence_length})"
        return (*text, line)


def _exact(model: nn.Module, tokens: torch.Tensor, segment: torch.Tensor | None) -> torch.Tensor:
    """Logits (n * length, vocabulary)."""
    logits: torch.Tensor = model(tokens) if segment is None else model(tokens, segment)
    # In float32 under autocast too: a sum of exponentials over a vocabulary.
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)


def _lengths(arrays: Arrays) -> Ints:
    """Returns the number of tokens of each sample, without padding."""
    return np.asarray(arrays.get(LENGTH, arrays[NUM_ITEMS]), np.int64)


def _cut(longest: int, config: LanguageConfig) -> int:
    """The length that a batch is cut to: the next of `buckets` equally spaced ones; all of it if unknown."""
    whole = config.sequence_length
    if config.text != "padded" or not longest:
        return whole
    step = -(-whole // config.buckets)
    return min(whole, -(-longest // step) * step)


def _path(data: DataConfig) -> Path:
    if data.name in ("stdlib", "synthetic") or data.mix is not None:
        return Path()
    if not isinstance(data.path, Path):
        wanted = {
            "tokens": "FOLDER, with train.bin and val.bin",
            "hf": "FOLDER, by save_to_disk",
            "conversations": "FILE.jsonl, or a folder with train.jsonl and val.jsonl",
        }
        what = wanted.get(data.name, "FILE, a text")
        raise BadInputError(f"data.path is missing: data.name={data.name} needs data.path={what}")
    path = local_path(data.path)
    if data.name in ("tokens", "hf"):
        check_folder(path, data.name)
    return path


def _texts(data: DataConfig, path: Path, config: LanguageConfig, seed: int) -> tuple[Text, Text]:
    """Returns the texts for training and for evaluation, in memory."""
    if data.name == "stdlib":
        return stdlib_text()
    if data.name == "text":
        return character_text(path)
    if data.name == "hf":
        return arrow_text(path, data.eval_split, data.input_column or "text")
    length, vocabulary = config.sequence_length, config.vocabulary or _RANDOM_VOCABULARY
    if data.name == "synthetic":
        longest = 0 if config.text == "stream" else length
        samples = (data.samples, max(1, data.samples // 8))
        learned, held = (
            random_text(vocabulary, n * length + 1, seed + part, longest) for part, n in enumerate(samples)
        )
        return learned, held
    if data.name != "tokens":
        raise AssertionError(f"data.name={data.name} is no text")
    files = [path / "train.bin", path / "val.bin"]
    texts, abouts = [], []
    for file in files:
        about = about_or(file, None, None)
        assert about is not None
        texts.append(_documents(file, about, config, config.vocabulary or about.vocabulary))
        abouts.append(about)
    _same_tokenizer(files, abouts)
    return texts[0], texts[1]


def _documents(file: Path, about: TokenFile, config: LanguageConfig, vocabulary: int) -> Text:
    """A token file with its documents, in memory."""
    check_tokens(file, config.sequence_length, about.dtype, vocabulary)
    return file_text(file, about)


def _without_tokens(about: TokenFile | None, vocabulary: int) -> Text:
    """Describes a token file; its tokens stay in the file."""
    nothing = np.empty(0, np.uint16)
    if about is None:
        return Text(nothing, vocabulary, None, "unknown")
    return text_about(nothing, about)


def _same_tokenizer(files: list[Path], abouts: list[Any]) -> None:
    learned, held = abouts
    if learned and held:
        names = ("tokenizer", "tokenizer_sha256", "vocabulary", "end_of_document")
        if odd := [name for name in names if getattr(learned, name) != getattr(held, name)]:
            raise BadInputError(
                f"{files[0]} and {files[1]} are of different tokenizers ({odd[0]} "
                f"{getattr(learned, odd[0])} and {getattr(held, odd[0])}): tokenize both with the same"
            )
