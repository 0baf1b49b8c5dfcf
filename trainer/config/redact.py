"""Secrets are taken out of whatever leaves a run: files, lines, tracebacks.

What counts as one: the user and password of a URL, and the value of a key whose name says that it is secret
(`AWS_SECRET_ACCESS_KEY=…`, `"password": "…"`, `--token …`, `?X-Amz-Signature=…`). A secret without such a
sign can't be told from other text.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

REDACTED = "***"

# Ends of names, so that token_dtype, tokens and tokenizer are none; "secret" and "password" anywhere.
_SECRET = (
    r"[\w.\-]*?(?:(?:secret|passw(?:or)?d|passphrase)[\w.\-]{0,80}"
    r"|(?:(?<!per_)token|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|credentials?|signature|authorization"
    r"|(?<![a-z])(?:sig|pwd))\d*)"
)
_NAME = re.compile(rf"(?:{_SECRET})", re.IGNORECASE)
# In a query these are secret as well.
_PARAMETER = rf"(?:{_SECRET}|key|auth)"
# A value: a list, quoted (with \" in it), or up to what ends it in text, JSON, YAML and shells.
_LIST = r"[\[{][^\[\]{}]{0,4000}[\]}]"
_QUOTED = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_VALUE = rf"""(?:{_LIST}|{_QUOTED}|(?:bearer|basic)\s+[^\s,;"'&]+|[^\s,;"'&)\]}}]+)"""

# Its length is bounded, and so is a password's below: no text may take quadratic time. A URL that was taken
# for a path has lost a slash.
_SCHEME = r"(?<![a-z0-9+.\-])[a-z][a-z0-9+.\-]{1,30}://?"

_PATTERNS = [
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), with_what)
    for pattern, with_what in (
        (
            r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)",
            rf"-----BEGIN \1-----{REDACTED}",
        ),
        # A password may hold / and @; host:8080/a@b is none.
        (rf"""({_SCHEME})[^\s/@:"']*:(?!\d+(?:[/?#\s"']|$))[^\s"]{{0,4000}}@""", rf"\1{REDACTED}@"),
        (rf"""({_SCHEME})[^\s/?#"']{{1,1000}}@""", rf"\1{REDACTED}@"),
        (rf"""([?&;]{_PARAMETER}=)[^&;#\s"'\\]+""", rf"\1{REDACTED}"),
        # key=value, key: value, "key": "value", and the same within a string that is quoted once more. (What
        # --env-from says of a secret is its name.)
        (
            rf"""(?<![\w.\-])(?<!unexpected )(?<!--env-from )({_SECRET}\\?["']?\s*(?:=(?!=)|:(?!/))\s*)"""
            rf"""(?:\\"[^"\\]*\\"|{_VALUE})""",
            rf"\1{REDACTED}",
        ),
        (rf"""(?<![\w\-])(--?{_SECRET}(?:["'],)?\s+)(?!-){_VALUE}""", rf"\1{REDACTED}"),
        (r"\b(bearer\s+)[\w.~+/\-]{8,}=*", rf"\1{REDACTED}"),
    )
]
# Each of them matches one of these: most values of a configuration are a word, and hold none.
_SIGN = re.compile(r"[=:\s]")


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a key's name says that its value is secret."""
    return _NAME.fullmatch(name) is not None


def redact_text(text: str) -> str:
    """Text without the secrets that can be recognized in it."""
    if _SIGN.search(text) is None:
        return text
    for pattern, with_what in _PATTERNS:
        text = pattern.sub(with_what, text)
    return text


def redact(value: Any) -> Any:
    """The same for mappings and sequences, as JSON has them, at any depth; numbers stay as they are."""
    if isinstance(value, str):
        return redact_text(value)
    if value is None or isinstance(value, (int, float)):  # asked first: there are many, and it is quick
        return value
    if isinstance(value, Mapping):
        return {key: _hidden(item) if is_secret(str(key)) else redact(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [redact(item) for item in value]
    return value


def redact_words(words: Sequence[str]) -> list[str]:
    """The words of a command line: also a value that is a word of its own, or that holds blanks."""
    cleaned = list[str]()
    for before, word in zip(["", *words], words, strict=False):
        name, equals, _ = word.lstrip("-").partition("=")
        if equals and is_secret(name):
            word = word.partition("=")[0] + f"={REDACTED}"  # noqa: PLW2901
        elif before.startswith("-") and is_secret(before.lstrip("-")):
            word = REDACTED  # noqa: PLW2901
        cleaned.append(redact_text(word))
    return cleaned


def _hidden(value: Any) -> Any:
    """What stands for a secret value. Numbers stay: they are figures such as loss_per_token."""
    if isinstance(value, str):
        return REDACTED if value else value
    if isinstance(value, Mapping):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_hidden(item) for item in value]
    return value
