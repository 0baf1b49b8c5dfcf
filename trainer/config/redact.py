"""Redaction of secrets in all output of a run: files, lines, tracebacks.

Secrets are the user and password of a URL, the value of a key whose name says that it is secret
(`AWS_SECRET_ACCESS_KEY=…`, `"password": "…"`, `--token …`, `?X-Amz-Signature=…`), and words with the prefix
of a well-known service's tokens (`hf_…`, `ghp_…`). A secret without such a sign isn't recognized.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

REDACTED = "***"

# Ends of names, so that token_dtype, tokens and tokenizer are none; "secret" and "password" anywhere.
_SECRET = (
    r"[\w.\-]*?(?:(?:secret|passw(?:or)?d|passphrase)[\w.\-]{0,80}"
    r"|(?:(?<!per_)token|(?:access|api|auth|bearer|hf|refresh|session)[_-]?tokens|api[_-]?keys?"
    r"|(?:access|account|deploy|encryption|master|private|shared[_-]?access|signing|ssh|storage|wandb)"
    r"[_-]?key(?:[_-]?id)?"
    r"|credentials?|signature|authorization|(?<![a-z])(?:sig|pwd|passcode|otp|session[_-]?id))\d*"
    r"|(?<=_)pass\d*)"
)
# Names that are also words: numbers as values are kept, and so are the words in a sentence.
_WORD = r"(?:pass|auth)"
_NAME = re.compile(rf"(?:{_SECRET}|{_WORD}|(?:set[_-]?)?cookies?)", re.IGNORECASE)
# In a query these are secret as well.
_PARAMETER = rf"(?:{_SECRET}|key|auth|pass)"
# A value: a list (three deep, or all of the line), quoted (with \" in it), or up to what ends it in text,
# JSON, YAML and shells.
_FLAT = r"[\[{][^\[\]{}]{0,4000}[\]}]"
_NESTED = rf"[\[{{](?:[^\[\]{{}}]|{_FLAT}){{0,4000}}[\]}}]"
_LIST = rf"(?:[\[{{](?:[^\[\]{{}}]|{_NESTED}){{0,4000}}[\]}}]|[\[{{][^\n]*)"
_QUOTED = r"""[bBfFrRuU]{0,2}(?:\"{3}.*?\"{3}|'{3}.*?'{3}|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_SCHEMES = r"(?:(?:bearer|basic|token|apikey|negotiate)\s+[^\s,;\"'&]+|(?:digest|aws4-hmac-sha256)\s[^\n]+)"
_VALUE = rf"""(?:{_LIST}|{_QUOTED}|{_SCHEMES}|[^\s,;"'&)\]}}]+)"""
_IS = r"""(?:=>|=(?!=)|:(?!/))"""
_NO_NUMBER = r"(?![-+]?[\d.,]+(?:e[-+]?\d+)?(?:[\s,;)\]}]|\Z)|(?:true|false|none|null|yes|no)\b)"

# Its length is bounded, and so is a password's below: no text may take quadratic time. A URL that was taken
# for a path has lost a slash.
_SCHEME = r"(?<![a-z0-9+.\-])[a-z][a-z0-9+.\-]{1,30}://?"

# Prefixes of services' tokens, from their documentation and from detect-secrets and gitleaks.
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9_\-])(?:"
    r"(?:hf|gsk|r8|npm)_[A-Za-z0-9]{30,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w\-]{20,}"
    r"|sk-(?:proj|ant|svcacct|admin|or)-[\w\-]{20,}|sk-(?=[a-zA-Z]*\d)(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{32,}"
    r"|(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|eyJ[\w\-]{8,}\.eyJ[\w\-]{8,}\.[\w\-]{8,}|xox[a-z]-[\w\-]{10,}|xapp-[\w\-]{20,}|AIza[\w\-]{35}"
    r"|pypi-AgE[\w\-]{20,}|dop_v1_[a-f0-9]{40,}|SG\.[\w\-]{16,}\.[\w\-]{16,}|ya29\.[\w\-]{20,}"
    r"|hvs\.[\w\-]{20,}|dckr_pat_[\w\-]{20,}|nvapi-[\w\-]{40,}|local-[0-9a-f]{40})"
)

_PATTERNS = [
    (re.compile(pattern, re.IGNORECASE | re.DOTALL | re.MULTILINE), with_what)
    for pattern, with_what in (
        (
            r"-----BEGIN ([A-Z ]*PRIVATE KEY(?: BLOCK)?)-----.*?(?:-----END \1-----|\Z)",
            rf"-----BEGIN \1-----{REDACTED}",
        ),
        # A password may hold / and @; host:8080/a@b is none.
        (rf"""({_SCHEME})[^\s/@:"']*:(?!\d+(?:[/?#\s"']|$))[^\s"]{{0,4000}}@""", rf"\1{REDACTED}@"),
        (rf"""({_SCHEME})[^\s/?#"']{{1,1000}}@""", rf"\1{REDACTED}@"),
        (
            r"""(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/)[^\s"']+""",
            rf"\1{REDACTED}",
        ),
        (rf"""([?&;]{_PARAMETER}=)[^&;#\s"'\\]+""", rf"\1{REDACTED}"),
        (rf"""((?<![\w.\-%]){_SECRET}%3D)[^%&\s"']+""", rf"\1{REDACTED}"),
        (rf"""(<({_SECRET})>)[^<]+""", rf"\1{REDACTED}"),
        # Headers, whose value goes to the end of the line.
        (r"^([ \t<>*]*(?:proxy-)?authorization[ \t]*:[ \t]*)[^\n]+", rf"\1{REDACTED}"),
        (
            rf"""((?<![\w\-])(?:set-)?cookies?["']?\s*{_IS}\s*)(?:{_LIST}|{_QUOTED}|[^\n"']+)""",
            rf"\1{REDACTED}",
        ),
        # Values that YAML writes below a key, and after it on its line.
        (
            rf"""^([ \t]*)((?:-[ \t])?["']?(?:{_SECRET}|{_WORD})["']?[ \t]*:)[ \t]*(?:[|>][-+\d]*[ \t]*)?\n"""
            r"(?:(?:\1[ \t]+|\1-[ \t])[^\n]*(?:\n|\Z))+",
            rf"\1\2 {REDACTED}\n",
        ),
        (
            rf"""^([ \t]*(?:-[ \t])?{_SECRET}(?:[ \t]*:|[ \t]+=)[ \t]+)(?=[^\s"'\[{{|>=])[^\r\n]*""",
            rf"\1{REDACTED}",
        ),
        # {"name": "HF_TOKEN", "value": "…"}, as pods have it.
        (
            rf"""(\bname["']?\s*[:=]\s*["']?{_SECRET}["']?\s*[,\n]\s*["']?value["']?\s*[:=]\s*){_VALUE}""",
            rf"\1{REDACTED}",
        ),
        # key=value, key: value, "key": "value", and the same within a string that is quoted once more. (What
        # --env-from says of a secret is its name.)
        (
            rf"""(?<![\w.\-])(?<!unexpected )(?<!--env-from )({_SECRET}\\?["']?\s*{_IS}\s*)"""
            rf"""(?:\\"[^"\\]*\\"|{_VALUE})""",
            rf"\1{REDACTED}",
        ),
        (
            rf"""((?:(?<![\w.\-]){_WORD}=|["']{_WORD}["']\s*{_IS}\s*|^[ \t]*{_WORD}:[ \t]+))"""
            rf"{_NO_NUMBER}{_VALUE}",
            rf"\1{REDACTED}",
        ),
        (rf"""(?<![\w\-])(--?{_SECRET}(?:["'],)?\s+)(?!-){_VALUE}""", rf"\1{REDACTED}"),
        (r"""\b(bearer["']?\s*(?:[:=]\s*|\s))[\w.~+/\-]{8,}=*""", rf"\1{REDACTED}"),
        # curl -u me:…, netrc, docker login -p …, wandb login …
        (
            r"""((?<![\w\-])(?:-u|--user|--proxy-user)(?:["'],?[ \t]*["']?|[ \t=]+["']?))"""
            r"""[^\s:"'/]+:(?!\d+:?(?:[\s"']|$))[^\s"']+""",
            rf"\1{REDACTED}",
        ),
        (r"(\blogin\s+\S{1,200}\s+password\s+)\S+", rf"\1{REDACTED}"),
        (r"(\b(?:docker|podman|az)\s+login\b[^\n]{0,200}?\s-p[ \t]*)\S+", rf"\1{REDACTED}"),
        (r"(\b(?:mysql\w{0,20}|sshpass)\b[^\n]{0,200}?\s-p)[^\s\-]\S*", rf"\1{REDACTED}"),
        (r"(\bwandb\s+login\s+(?:--[\w=\-]+\s+)?)[\w\-]{16,}", rf"\1{REDACTED}"),
    )
]
_USER = re.compile(r"(?:-u|--user|--proxy-user) [^:/]+:(?!\d+$).+", re.DOTALL)
# Each of them needs one of these: most values of a configuration, and most lines, have none.
_SIGNS = (
    *("token", "key", "secret", "pass", "auth", "sig", "@", "pwd", "credential", "cookie", "bearer"),
    *("session", "otp", "-u", "user", "login", "mysql", "hooks.slack", "discord"),
)
_SHORTEST = 12  # of a token


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """True if a key's name says that its value is secret."""
    return _NAME.fullmatch(name) is not None


def redact_text(text: str) -> str:
    """Returns a text with its recognizable secrets replaced."""
    if len(text) >= _SHORTEST:
        text = _TOKENS.sub(REDACTED, text)
    small = text.lower()
    if not any(sign in small for sign in _SIGNS):
        return text
    for pattern, with_what in _PATTERNS:
        text = pattern.sub(with_what, text)
    return text


def redact(value: Any) -> Any:
    """Redacts mappings and sequences of JSON, at any depth; numbers are kept."""
    if isinstance(value, str):
        return redact_text(value)
    if value is None or isinstance(value, (int, float)):  # asked first: there are many, and it is quick
        return value
    if isinstance(value, Mapping):
        # {"name": "HF_TOKEN", "value": "…"}, as pods have it.
        named = isinstance(name := value.get("name"), str) and is_secret(name)
        return {
            key: _hidden(item) if is_secret(str(key)) or (named and key == "value") else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [redact(item) for item in value]
    return value


def redact_words(words: Sequence[str]) -> list[str]:
    """Redacts the words of a command line, also values that are words of their own or hold blanks."""
    cleaned = list[str]()
    for before, word in zip(["", *words], words, strict=False):
        if _USER.fullmatch(f"{before} {word}"):
            word = REDACTED  # noqa: PLW2901
        name, equals, _ = word.lstrip("-").partition("=")
        if equals and is_secret(name):
            word = word.partition("=")[0] + f"={REDACTED}"  # noqa: PLW2901
        elif before.startswith("-") and is_secret(before.lstrip("-")):
            word = REDACTED  # noqa: PLW2901
        cleaned.append(redact_text(word))
    return cleaned


def _hidden(value: Any) -> Any:
    """Returns the replacement of a secret value. Numbers are kept: they are figures like loss_per_token."""
    if isinstance(value, str):
        return REDACTED if value else value
    if isinstance(value, Mapping):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_hidden(item) for item in value]
    return value
