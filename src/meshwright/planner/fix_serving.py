"""What the user fixed of a layout, or changes in a serving plan: values of its fields, read from text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from meshwright.core.errors import InputError
from meshwright.core.serving import Layout, Requests, ServingPlan
from meshwright.core.values import shortened
from meshwright.planner.fix import known, named_values

FIELDS = tuple(Layout.model_fields)


def parse_layout(texts: Iterable[str], option: str = "--fix") -> dict[str, Any]:
    """`tp=2`, `step_tokens=1024`, ... to values of a layout. A field may be named once.

    Raises InputError naming the text.
    """
    return {name: _value(name, text, option) for name, text in named_values(texts, FIELDS, option, "tp=2")}


def _value(name: str, text: str, option: str) -> Any:
    where = f"{option} {name}={text}"
    if name not in FIELDS:
        raise InputError(f"{where}: not a field of a layout; {known(name, FIELDS)}")
    value = text.split(",") if name == "layers_per_stage" else text
    try:
        return getattr(Layout.model_validate({name: value}), name)
    except ValidationError as error:
        raise InputError(f"{where}: {error.errors()[0]['msg']} (got {shortened(repr(value))})") from None


def changed(plan: ServingPlan, texts: Iterable[str]) -> ServingPlan:
    """The plan with these fields of its layout or requests. What was not named follows: replicas from the other degrees
    and the devices, a list of layers per stage is given up where pp changes.

    Raises:
        InputError: no such field or value, or nothing is changed.
        RuleError: the result is illegal.
    """
    of_requests: dict[str, Any] = {}
    of_layout: list[str] = []
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if name in Requests.model_fields and value:
            of_requests[name] = None if value == "none" else value
        else:
            of_layout.append(text)
    requests = Requests.parse({**plan.requests.model_dump(), **of_requests}, "--set")
    named = parse_layout(of_layout, "--set")
    layout = Layout.parse({**plan.layout.model_dump(), **named}, "--set")
    follows: dict[str, Any] = {}
    if "replicas" not in named and (layout.tp, layout.pp) != (plan.layout.tp, plan.layout.pp):
        follows["replicas"] = max(1, plan.cluster.num_devices // (layout.tp * layout.pp))
    if "layers_per_stage" not in named and layout.pp != plan.layout.pp:
        follows["layers_per_stage"] = None
    layout = layout.model_copy(update=follows)
    if (requests, layout) == (plan.requests, plan.layout):
        raise InputError("nothing is changed; give --set FIELD=VALUE with another value than the plan's")
    return ServingPlan(model=plan.model, cluster=plan.cluster, requests=requests, layout=layout)
