"""Promise: credentials are never written or shown, and nothing else is redacted."""

import json

import pytest
from hypothesis import given, strategies as st

from trainer.config.recipe import Recipe
from trainer.config.redact import REDACTED, is_secret, redact, redact_text, redact_words
from trainer.config.section import describe

S = "hunter2/x+Y9"


@pytest.mark.parametrize(
    "text",
    [
        f"https://me:{S}@host/data",
        "https://hunter2@host/data",
        "https:/me:hunter2@host/data",
        "https:/hunter2@host/data",
        f"s3://AKIA:{S}@bucket/a b",
        "https://me:hunter2@host:8080/x?y=1",
        "https://me:hun@ter2@host/x",
        f"https://me:pa'{S}@host/x",
        f"https://me:{'x' * 1500}{S}@host/x",
        f"{{'token': ['{S}', '{S}']}}",
        f'{{"password": {{"value": "{S}"}}}}',
        f"can't open 'https://me:{S}@host/data' (no route)",
        "https://h/x?X-Amz-Credential=hunter2&X-Amz-Date=1&X-Amz-Signature=hunter2",
        "https://h/x?a=1&token=hunter2#top",
        "https://h/x?sig=hunter2&se=2026",
        "https://h/x?AWSAccessKeyId=hunter2&key=hunter2",
        "AWS_SECRET_ACCESS_KEY=hunter2",
        f"export HF_TOKEN={S}; trainer train",
        "optim.password = hunter2",
        "api_key: hunter2",
        "Authorization: Bearer hunter2hunter2",
        "{'Authorization': 'Bearer hunter2'}",
        "curl -H bearer hunter2hunter2",
        '{"password": "hun\\"ter2 and more hunter2", "a": 1}',
        "{'db_password_prod': 'hunter2, hunter2'}",
        json.dumps(json.dumps({"secret": "hunter2"})),
        "trainer train --token hunter2 --out x",
        "['--password', 'hunter2']",
        "wandb_api_key='hunter2 hunter2'",
        "accessToken=hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\nhunter2\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_secrets_go(text: str) -> None:
    cleaned = redact_text(text)
    assert "hunter2" not in cleaned and "ter2" not in cleaned
    assert REDACTED in cleaned
    assert redact_text(cleaned) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "data.token_dtype=uint16",
        "name: tokens, tokenizer: bytes",
        "tokens=5 sigma=1.5 configuration: x",
        "http://host:8080/a@b/c",
        "http://[::1]:8080/x?epoch=3&monkey=1",
        "me@example.org: hello",
        "optim.lr=0.1 design=new passes=3",
        "step 200/674  7,294 samples/s loss 0.6117  5 s left",
        "if token == other: raise",
        "loss_per_token=3.5",
        "unexpected token: ','",
        "bucket/x:y@z",
        "secret://path",
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert redact_text(text) == text


def test_no_key_of_a_recipe_is_one() -> None:
    for key in describe(Recipe):
        assert not is_secret(key.name) and not is_secret(key.name.rpartition(".")[2]), key.name
    values = Recipe(epochs=1).model_dump(mode="json")
    assert redact(values) == values
    for name in ("data.tokens", "data.token_dtype", "tokenizer", "model.vocabulary", "data.name"):
        assert not is_secret(name)


def test_mappings_at_any_depth() -> None:
    value = {
        "env": [{"API_KEY": "hunter2", "loss_per_token": 0.25, "n": None}],
        "token": {"a": "hunter2", "b": ["hunter2"]},
        "password": "",
        "path": "https://u:hunter2@h/x",
        "secret": 7,
    }
    assert redact(value) == {
        "env": [{"API_KEY": REDACTED, "loss_per_token": 0.25, "n": None}],
        "token": {"a": REDACTED, "b": [REDACTED]},
        "password": "",
        "path": f"https://{REDACTED}@h/x",
        "secret": 7,
    }


def test_words_of_a_command() -> None:
    words = [
        "train",
        "--token",
        "-hunter 2",
        "--set",
        "x.password=a b",
        "--set",
        "a=https://u:p@h",
        "--tokens",
        "5",
    ]
    assert redact_words(words) == [
        *("train", "--token", REDACTED, "--set", f"x.password={REDACTED}"),
        *("--set", f"a=https://{REDACTED}@h", "--tokens", "5"),
    ]


_SECRETS = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=12, max_size=30)


@given(_SECRETS, st.sampled_from(["password", "MY_SECRET", "hf_token", "x.api-key", "aws_secret_access_key"]))
def test_any_value_of_a_secret_key_goes_in_every_form(secret: str, name: str) -> None:
    for text in (
        f"{name}={secret}",
        f"{name}: {secret}\n",
        json.dumps({name: secret}),
        repr({name: secret}),
        f"--{name} {secret}",
        f"https://h/?a=b&{name}={secret}&c=d",
    ):
        assert secret not in redact_text(text)


@given(st.text())
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    once = redact_text(text)
    assert redact_text(once) == once
