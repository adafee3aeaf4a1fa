"""A model's own chat template: messages as the one text that it was trained on. Free of torch.

Templates are programs in Jinja that come with a model; they run in Jinja's sandbox, which lets them read nothing but
what they are given and change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.core.errors import InputError


class ChatTemplate:
    """Renders messages.

    Args:
        source: the template.
        special: names and texts of special tokens, which templates write.

    Raises:
        InputError: it is no Jinja template.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InputError(f"the model's chat template cannot be read: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that asks for the assistant's next message. Raises InputError where the template refuses."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InputError(f"messages: the model's chat template refuses them: {error}") from None


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
