"""Chat templates: jinja2 programs of strangers, run in its sandbox as `transformers` does."""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import BadInputError, first_line

if TYPE_CHECKING:
    from jinja2 import Template

Spans = list[tuple[int, int]]

# What a template that asks for today's date is given, or a run wouldn't repeat: the one that Llama 3's has.
TODAY = "2024-07-26"
_MARKS = "\ufdd0\ufdd1"  # no characters, by Unicode's definition: around what {% generation %} holds


def compiled(folder: Path, sources: Mapping[str, str]) -> tuple[dict[str, "Template"], bool, set[str]]:
    """Compiles templates by name; whether the default one has {% generation %} blocks; what names they read.

    Raises:
        BadInputError: If one isn't a template.
    """
    if not sources:
        return {}, False, set()
    from jinja2 import TemplateError, meta

    made, marks, reads = dict[str, "Template"](), False, set[str]()
    for name, source in sources.items():
        environment = _environment()
        try:
            made[name] = environment.from_string(source)
            reads |= meta.find_undeclared_variables(environment.parse(source))
        except (TemplateError, RecursionError) as error:
            raise BadInputError(
                f"{folder}: its chat template is none that jinja2 reads ({first_line(error)}); mend "
                "chat_template.jinja"
            ) from error
        marks = marks or (name == "default" and "has_generation" in environment.globals)
    return made, marks, reads


def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block {% generation %}, by which templates mark what an assistant writes."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Parser) -> nodes.Node:
            """Puts marks around the block."""
            self.environment.globals["has_generation"] = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        @staticmethod
        def _marked(caller: Any) -> str:
            return f"{_MARKS[0]}{caller()}{_MARKS[1]}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **keys: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=datetime.fromisoformat(TODAY).strftime,
    )
    return environment


def unmarked(marked: str) -> tuple[str, Spans]:
    """Takes the marks of {% generation %} out of a text; where in it they stood."""
    parts, spans, begin, length = list[str](), Spans(), 0, 0
    for part in re.split(f"([{_MARKS}])", marked):
        if part == _MARKS[0]:
            begin = length
        elif part == _MARKS[1]:
            spans.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), spans
