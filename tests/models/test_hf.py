"""Promise: a model of transformers computes of documents side by side what the library does of each alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.hf_models import FAMILIES, NEEDS, PLACES, WORDS, Exactly64, folder_of, lengths, made
from trainer.errors import BadInputError
from trainer.models.gpt import generated
from trainer.models.hf import HfLanguage, hf_model
from trainer.models.weights import load_initial

pytestmark = NEEDS


def loaded(folder: Path, dtype: torch.dtype = torch.float64) -> HfLanguage:
    model = hf_model(f"hf/{folder}", PLACES)
    load_initial(model, folder, None)
    return model.to(dtype).eval()


def documents() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Two rows of tokens, their segments, and the documents of the first."""
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, WORDS, (2, PLACES), generator=drawn)
    numbers = [number for number, length in enumerate(lengths()) for _ in range(length)]
    segment = torch.tensor([numbers + [99] * (PLACES - len(numbers)), [7] * PLACES], dtype=torch.int16)
    return tokens, segment, list(tokens[0].split([*lengths(), PLACES - sum(lengths())]))


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_side_by_side_are_what_each_is_alone(family: str, tmp_path: Path) -> None:
    model, theirs = loaded(folder_of(family, tmp_path)), made(family).double()
    tokens, segment, alone = documents()
    with torch.no_grad(), Exactly64():
        packed = model(tokens, segment)
        for ours, document in zip(packed[0].split([len(one) for one in alone]), alone, strict=True):
            wanted = theirs(document[None]).logits[0]
            assert (ours - wanted).abs().max() <= 1e-12
        assert (packed[1] - theirs(tokens[1:]).logits[0]).abs().max() <= 1e-12
        assert (model(tokens) - theirs(tokens).logits).abs().max() <= 1e-12
        # In a batch that pads the shorter one.
        longest = max(len(one) for one in alone)
        rows = torch.stack([F.pad(one, (0, longest - len(one))) for one in alone])
        mask = torch.stack([F.pad(torch.ones(len(one)), (0, longest - len(one))) for one in alone])
        padded = theirs(rows, attention_mask=mask.long()).logits
        for row, (ours, document) in enumerate(zip(model(rows), alone, strict=True)):
            assert (ours - padded[row])[: len(document)].abs().max() <= 1e-12


@pytest.mark.parametrize("family", ["llama", "gemma2", "smollm3", "gpt2", "phi3", "cohere2"])
def test_a_text_goes_on_from_what_was_kept_of_it(family: str, tmp_path: Path) -> None:
    """Keys and values of a cache give the logits of the whole text, up to the model's last place."""
    model = loaded(folder_of(family, tmp_path))
    tokens, cache = documents()[0][0], model.cache()
    with torch.no_grad(), Exactly64():
        wanted = model(tokens[None])[0]
        for begin, end in ((0, 9), *((n, n + 1) for n in range(9, PLACES))):
            found = model.following(tokens[None, begin:end], cache)
            assert (found - wanted[end - 1]).abs().max() <= 1e-12
    assert model.places == PLACES * (2 if family == "llama" else 1)
    model.places = 16
    text = tokens[:9]
    for token in generated(model, text, 12, temperature=0):
        assert token == int(model(text[None])[0, -1].argmax())
        text = torch.cat((text, torch.tensor([token])))
    assert len(text) == 17, "the last token is computed from 16"
    with pytest.raises(ValueError, match="17 tokens"):
        list(generated(model, text, 1))


@pytest.mark.parametrize(("before", "places"), [(None, PLACES), (PLACES, 4 * PLACES), (12, PLACES)])
def test_a_model_has_the_places_of_its_configuration(before: Any, places: int, tmp_path: Path) -> None:
    """Not those of the samples, which it learns; `before` YaRN multiplied them by four."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0}
    scaled = before and {**yarn, "original_max_position_embeddings": before}
    folder = folder_of("mistral", tmp_path, rope_parameters=scaled)
    assert hf_model(f"hf/{folder}", 16).places == places
    assert hf_model(f"hf/{folder}", places).places == places
    with pytest.raises(BadInputError):
        hf_model(f"hf/{folder}", places + 1)


@pytest.mark.parametrize("family", ["gemma2", "granite", "phi", "cohere"])
def test_the_loss_in_pieces_is_cross_entropys(family: str, tmp_path: Path) -> None:
    model = loaded(folder_of(family, tmp_path))
    names, parameters = zip(*model.named_parameters(), strict=True)
    tokens, segment, _ = documents()
    targets = torch.where(torch.arange(PLACES) % 3 > 0, tokens.roll(-1, 1), -100)
    whole = F.cross_entropy(model(tokens, segment).mT, targets, reduction="sum")
    ours, theirs = (
        dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        for loss in (model(tokens, segment, targets), whole)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
