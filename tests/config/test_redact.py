"""Promise: secrets are never written or shown, by their value or their form; ordinary texts stay."""

import base64
import json
import shlex
import time
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, strategies as st

from trainer.config.redact import REDACTED, is_masked, is_same, is_secret, redact, redact_text, salted

S = "hunter2/x+Y9 é\"'z"


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", S)
    monkeypatch.setenv("GITHUB_TOKEN", "accuracy")
    monkeypatch.setenv("KEY", "1")


@pytest.mark.parametrize("name", ["HF_TOKEN", "PGPASSWORD"])
def test_what_a_variable_holds_goes_wherever_it_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "Zq9-hunter2")
    assert redact_text("no: Zq9-hunter2 (x=[Zq9-hunter2])") == f"no: {REDACTED} (x=[{REDACTED}])"
    assert redact({"a": ["bZq9-hunter2c", 1]}) == {"a": [f"b{REDACTED}c", 1]}
    monkeypatch.delenv(name)
    assert redact_text("Zq9-hunter2") == "Zq9-hunter2"


@pytest.mark.parametrize(
    "form",
    [
        *(json.dumps, repr, shlex.quote, quote),
        lambda text: quote(text, safe=""),
        lambda text: json.dumps({"Authorization": f"Bearer {text}"}),
        lambda text: f"https://me:{quote(text, safe='')}@host/x",
    ],
)
def test_a_value_goes_however_it_is_quoted(form: Any) -> None:
    assert "hunter2" not in redact_text(f"{form(S)} and {form(S)}")


@given(st.binary(max_size=9), st.binary(max_size=9), st.booleans())
def test_a_value_goes_within_base64(before: bytes, after: bytes, url: bool) -> None:
    encode = base64.urlsafe_b64encode if url else base64.b64encode
    cleaned = redact_text(encode(before + S.encode() + after).decode())
    assert REDACTED in cleaned and len(cleaned) <= (len(before) + len(after)) * 4 / 3 + 12


@pytest.mark.parametrize("value", ["short", "1234567890", "/run/secrets/token.json", "Accuracy"])
def test_short_values_numbers_paths_and_our_words_stay(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", value)
    assert redact_text(f"of {value}, {value}") == f"of {value}, {value}"


def test_the_user_of_a_variables_url_goes_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:pass%2Fword9@host/x")
    assert redact_text("pass/word9 or pass%2Fword9") == f"{REDACTED} or {REDACTED}"


P = "hunter2Zq9"
# Some are of documents: alphabets, zeros and examples; none is a token of anybody.
GO = [
    f"https://me:{P}@host/data",
    f"https:/me:{P}@host/data",
    f"https://me:hun@{P}@host/x",
    f"https://me:{'x' * 1500}{P}@host/x",
    f"redis://:{P}@host:6379/0",
    f"amqp://u:p%40{P}@h//",
    f"https://h/x?X-Amz-Credential={P}&X-Amz-Date=1&X-Amz-Signature={P}",
    f"https://h/x?a=1&token={P}#top",
    f"https://h/x?AWSAccessKeyId={P}&key={P}",
    f"-----BEGIN RSA PRIVATE KEY-----\n{P}\n{P}\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{P}\n",
]
TOKENS = [
    *("hf_abcdefghijklmnopqrstuvwxyzABCDEFGH12", "ghp_abcdefghijklmnopqrstuvwxyz0123456789"),
    "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    *("sk-abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKL", "AKIAIOSFODNN7EXAMPLE"),
    "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    *("xoxb-123456789012-1234567890123-abcdefghijklmnopqrstuvwx", "glpat-abcdefghij0123456789"),
    *("AIzaSyA1234567890abcdefghijklmnopqrstuv", "pypi-AgEIcHlwaS5vcmcCJDAwMDAwMDAwLTAwMDAtMDAwMC0wMDAw"),
    "SG.abcdefghijklmnopqrstuv.abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG",
    "local-0123456789abcdef0123456789abcdef01234567",
]


@pytest.mark.parametrize("text", GO)
def test_secrets_go_by_their_form(text: str) -> None:
    cleaned = redact_text(f"can't open '{text}'\nso")
    assert P not in cleaned and REDACTED in cleaned and redact_text(cleaned) == cleaned


@pytest.mark.parametrize("text", TOKENS)
def test_tokens_of_services_go(text: str) -> None:
    assert redact_text(f"use {text}, or not") == f"use {REDACTED}, or not"


STAY = [
    *("sk-resnet34", "hf_hub:timm/sk-resnet18", "risk-adjusted-abcdefghijklmnopqrstuvwxyz", "hf_token_name"),
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    *("/data/imagenet/train/n01440764/n01440764_10026.JPEG", "YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXo="),
    *("http://host:8080/a@b/c", "me@example.org", "git@github.com:org/x.git", "bucket/x:y@z"),
    *("data.token_dtype=uint16", "tokens: 5", "tokenizer=bpe:tok.json", "unexpected token: ','"),
    *("secret://path", "max_tokens=4096", "pass=3", "passed: 12", "forward pass: 3.2 ms"),
    *("a password is needed", "authors: me", "auth none", "monkey=1", "primary_key: id", "class_key=label"),
    "--key image",
    *("cache_key=abc", "eyJhbGc", "AKIAH", "-u 1000:1000", "user: 1000:1000", "cookies are good"),
    "step 200/674  7,294 samples/s loss 0.6117  5 s left",
    *("id: 0123456789abcdef0123456789abcdef01234567", "desk-abcdefghijklmnopqrstuvwxyz0123456789AB"),
]


@pytest.mark.parametrize("text", STAY)
def test_an_ordinary_text_stays(text: str) -> None:
    assert redact_text(text) == text
    assert redact({"about": text, "of": [text]}) == {"about": text, "of": [text]}


def test_names_that_say_it() -> None:
    assert all(map(is_secret, ("HF_TOKEN", "password", "api_key", "clientSecret", "AWS_SECRET_ACCESS_KEY")))
    assert not any(map(is_secret, ("tokens", "token_dtype", "tokenizer", "monkey", "sort_key", "key")))


def test_a_redacted_value_is_compared_by_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = f"/data/{S}/train", "/data/other/train"
    stored, known = redact(path), salted(path)
    assert S not in stored and S not in known
    assert is_same(stored, path, known) and not is_same(stored, other, known)
    monkeypatch.setenv("MY_TOKEN", "renewed hunter3")
    assert is_same(stored, "/data/renewed hunter3/train", known), "the token was renewed"
    monkeypatch.delenv("MY_TOKEN")
    assert is_same(stored, path, known) and not is_same(stored, other, known), "the variable isn't set"
    assert is_masked(stored, path) and not is_masked(stored, "/data/") and is_masked(other, other)


def _seconds(text: str) -> float:
    began = time.process_time()
    redact_text(text)
    return time.process_time() - began


@pytest.mark.parametrize("piece", ["a", "token=", "ab://x:", "?sig=", "eyJ", "-----BEGIN PRIVATE KEY-----"])
def test_no_text_takes_quadratic_time(piece: str) -> None:
    """Eight times the text: 64 times as long by a quadratic pattern; other load is tried away."""
    one, many = piece * (2_500 // len(piece)), piece * (20_000 // len(piece))
    ratios = (_seconds(many) / max(_seconds(one), 1e-3) for _ in range(5))
    assert any(ratio < 30 for ratio in ratios)
