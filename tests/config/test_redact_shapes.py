"""Promise: secrets in about a hundred real forms are redacted; ordinary texts stay."""

import time

import pytest

from trainer.config.redact import REDACTED, is_secret, redact, redact_text, redact_words

S = "hunter2hunter2Zq9"
# None of these is a token of anybody: alphabets, zeros and examples from documents.
SECRETS = [
    # bytes, blocks, lists below a key
    f"token=b'{S}'",
    f"token: |\n  {S}\n  {S}\nnext: 1",
    f"password: one two {S}",
    f'{{"password": ["a", {{"b": "{S}"}}]}}',
    f"credentials={{'id': {{'k': '{S}'}}}}",
    f"password='''{S}'''",
    f'secret = """{S}\n{S}"""',
    f"Authorization: token {S}",
    f"token: >-\n    {S}\n",
    f"secrets:\n  - {S}\n  - {S}\n",
    f"password:\n  value: {S}\n",
    f"api_keys: [{S}, {S}]",
    f"access_tokens={S}",
    f"DB_PASS={S}",
    f"pass={S}",
    f"auth={S}",
    f"AccountKey={S}==",
    f"account_key: {S}",
    f"SSH_KEY={S}",
    f"signing_key={S}",
    f"encryption_key={S}",
    f"deploy_key={S}",
    f"private_key_id: {S}",
    f"Cookie: session={S}",
    f"Set-Cookie: sid={S}; Path=/",
    f"otp={S}",
    f"passcode={S}",
    f'{{"name":"HF_TOKEN","value":"{S}"}}',
    f"- name: HF_TOKEN\n  value: {S}",
    f"DefaultEndpointsProtocol=https;AccountName=x;AccountKey={S}==;EndpointSuffix=core",
    f"SharedAccessKey={S}",
    f"SharedAccessSignature=sr=x&sig={S}",
    "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH12",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "gho_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "sk-abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKL",
    "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789_ABC",
    "sk-ant-api03-abcdefghijklmnopqrstuvwxyz0123456789",
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE",
    "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "xoxb-123456789012-1234567890123-abcdefghijklmnopqrstuvwx",
    "https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX",
    "https://discord.com/api/webhooks/123456789012345678/abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef",
    f"machine h login me password {S}",
    f"curl -u me:{S} https://h",
    f"curl --user me:{S} https://h",
    f"--env DB_PASS={S}",
    f"mysql -p{S}",
    f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{S}\n-----END PGP PRIVATE KEY BLOCK-----",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{S}\n",
    "glpat-abcdefghij0123456789",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "npm_abcdefghijklmnopqrstuvwxyz0123456789",
    "pypi-AgEIcHlwaS5vcmcCJDAwMDAwMDAwLTAwMDAtMDAwMC0wMDAw",
    "dop_v1_abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789",
    "SG.abcdefghijklmnopqrstuv.abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG",
    "sk_live_abcdefghijklmnopqrstuvwx",
    "rk_live_abcdefghijklmnopqrstuvwx",
    "ya29.a0AfH6SMBabcdefghijklmnopqrstuvwxyz0123456789",
    "wandb: local-0123456789abcdef0123456789abcdef01234567",
    f"X-Api-Key: {S}",
    f"x-auth-token: {S}",
    f"Proxy-Authorization: Basic {S}==",
    f"Authorization: Basic {S}==",
    f"Authorization: {S}",
    f'Authorization: Digest username="me", response="{S}"',
    f"postgres://u:{S}@db/x",
    f"redis://:{S}@host:6379/0",
    f"mongodb+srv://u:{S}@c/x",
    f"amqp://u:p%40{S}@h//",
    f"jdbc:postgresql://h/db?user=u&password={S}",
    f"wandb login {S}",
    f"HF_TOKEN={S} trainer train",
    f"env HF_TOKEN={S}",
    f"export MLFLOW_TRACKING_PASSWORD={S}",
    f"PGPASSWORD={S} psql",
    f"docker login -u me -p {S}",
    f"['--token', '{S}']",
    f"['-u', 'me:{S}']",
    f"Namespace(token='{S}', x=1)",
    f"KeyError: 'password={S}'",
    f"dict(api_key='{S}')",
    f"api_key => {S}",
    f"<password>{S}</password>",
    f"token%3D{S}",
    f"client_secret={S}",
    f"clientSecret: {S}",
    f"AWS_SESSION_TOKEN={S}",
    f"aws_secret_access_key = {S}",
    f"s3_secret={S}",
    f"passphrase: {S}",
    f"user=me pwd={S};",
    f"bearer: {S}",
    f"BEARER_TOKEN={S}",
    f"session_id={S}",
    f"sessionToken={S}",
    f"refresh_token={S}",
    f"id_token={S}",
    f"master_key={S}",
    f"WANDB_KEY={S}",
    f"private-token: {S}",
    f"X-Vault-Token: {S}",
    f'"token" : "{S}"',
    f"'pass': '{S}'",
    f"token:{S}",
    f"Password : {S}",
    f"MYSQL_PWD={S}",
]
ORDINARY = [
    "sk-net",
    "sk-resnet34",
    "hf_hub",
    "hf_hub:timm/sk-resnet18",
    "task-specific",
    "risk-adjusted-abcdefghijklmnopqrstuvwxyz",
    "d2c1f0b1a7e64d8c9f00112233445566778899aabbccddeeff00112233445566",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "67eed98",
    "/data/imagenet/train/n01440764/n01440764_10026.JPEG",
    "YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXo=",
    "wandb run 3k2j1h4g",
    "2026-11-25T23:00:00",
    "http://host:8080/a@b/c",
    "me@example.org",
    "data.token_dtype=uint16",
    "tokens=5",
    "tokens: 5",
    "tokens_per_s=1e6",
    "loss_per_token=3.5",
    "tokenizer: bytes",
    "tokenizer=bpe:tok.json",
    "pass=3",
    "passes=3",
    "bypass=true",
    "passed: 12",
    "forward pass: 3.2 ms",
    "backward pass 12",
    "authors: me",
    "auth none",
    "key=value",
    "monkey=1",
    "keys: [a, b]",
    "primary_key: id",
    "keyed randomness",
    "class_key=label",
    "sort_key=name",
    "key: image",
    "--key image",
    "eyJ",
    "eyJhbGc",
    "AKI",
    "AKIAH",
    "xox",
    "ghp",
    "-u me",
    "-p 8080",
    "-u 1000:1000",
    "--user 1000:1000",
    "user: 1000:1000",
    "cookies are good",
    "secret://path",
    "unexpected token: ','",
    "author=me",
    "design=new",
    "sigma=1.5",
    "step 200/674  7,294 samples/s loss 0.6117  5 s left",
    "if token == other: raise",
    "bucket/x:y@z",
    "optim.lr=0.1",
    "token 256 ends a document",
    "a password is needed",
    "the token of the hub",
    "--tokens 5",
    "model.norm.weight",
    "conv1.weight: 1e-3",
    "max_tokens=4096",
    "num_tokens: 12",
    "cache_key=abc",
    "data.label_key=cls",
    "id: 0123456789abcdef0123456789abcdef01234567",
    "hf_transfer",
    "hf_token_name",
    "SK-Net",
    "desk-abcdefghijklmnopqrstuvwxyz0123456789AB",
    "git@github.com:org/x.git",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_in_this_shape_goes(text: str) -> None:
    cleaned = redact_text(text)
    assert REDACTED in cleaned
    assert S not in cleaned
    assert redact_text(cleaned) == cleaned
    assert S not in redact_text(f"RuntimeError: can't push\n{text}\nwith that")


@pytest.mark.parametrize("text", ORDINARY)
def test_an_ordinary_text_stays(text: str) -> None:
    assert redact_text(text) == text
    assert redact({"about": text, "of": [text]}) == {"about": text, "of": [text]}


@pytest.mark.parametrize(
    "name", ["DB_PASS", "pass", "auth", "AccountKey", "SSH_KEY", "api_keys", "Set-Cookie", "otp"]
)
def test_values_below_such_a_key_go_at_any_depth(name: str) -> None:
    assert is_secret(name)
    found = redact({name: {"a": [S, {"b": (S, 1)}]}, "n": 1})
    assert S not in repr(found) and found["n"] == 1
    assert S not in repr(redact_words(["x", f"--{name}", S, "--env", f"{name}={S}"]))


def test_pods_variables_and_words_of_curl() -> None:
    pod = {"env": [{"name": "HF_TOKEN", "value": S}, {"name": "EPOCHS", "value": "3"}]}
    assert redact(pod)["env"] == [{"name": "HF_TOKEN", "value": REDACTED}, {"name": "EPOCHS", "value": "3"}]
    assert redact_words(["curl", "-u", f"me:{S}"]) == ["curl", "-u", REDACTED]
    assert redact_words(["docker", "run", "-u", "1000:1000"]) == ["docker", "run", "-u", "1000:1000"]


_HOSTILE = ["a", "token", "token=", "token:[", "token={", "token='", "token='''", "http://", "ab://x:", " "]
_HOSTILE += [
    "token: ",
    "\n",
    "token:\n",
    "token:\n  ",
    "\n      token:",
    "cookie: ",
    "name: token\n",
    "login x ",
]
_HOSTILE += ["mysql", "-u a", "eyJ", "sk-", "hf_", "<token>", "token%3D", "key_", "secret", "password_", "- "]
_HOSTILE += ["token=[[],[],", "a_pass", "pass="]


def _seconds(text: str) -> float:
    began = time.process_time()
    redact_text(text)
    return time.process_time() - began


@pytest.mark.parametrize("piece", _HOSTILE)
def test_no_text_takes_quadratic_time(piece: str) -> None:
    """Eight times the text: 64 times as long by a quadratic pattern; other load is tried away."""
    one, many = piece * (2_500 // len(piece)), piece * (20_000 // len(piece))
    for head in ("", "token:"):
        ratios = (_seconds(head + many) / max(_seconds(head + one), 1e-3) for _ in range(5))
        assert any(ratio < 30 for ratio in ratios)
