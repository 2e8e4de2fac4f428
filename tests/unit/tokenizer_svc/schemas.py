"""Random JSON schemas and values that are likely to meet: few names, few values, every keyword."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "b", "c")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 4),
    st.sampled_from((0.5, 1.5, 2.0)),
    st.sampled_from(("", "x", "xy", "a")),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from((*NAMES, "d")), inner, max_size=3)
    ),
    max_leaves=5,
)


def _keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    names = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)
    some = st.lists(inner, min_size=1, max_size=3)
    size = st.integers(0, 3)
    return {
        "type": st.one_of(
            st.sampled_from(TYPES), st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True)
        ),
        "const": values,
        "enum": st.lists(values, min_size=1, max_size=3),
        "minimum": st.integers(-1, 3),
        "maximum": st.integers(-1, 3),
        "exclusiveMinimum": st.integers(-1, 3),
        "multipleOf": st.sampled_from((1, 2, 3)),
        "minLength": size,
        "maxLength": size,
        "pattern": st.sampled_from(("^x", "y$", "^(x|xy)$", "^a?$", "^(?=x)(?=.*y)", "^(?!x)", "a|^$")),
        "items": inner,
        "prefixItems": some,
        "minItems": size,
        "maxItems": size,
        "uniqueItems": st.booleans(),
        "contains": inner,
        "minContains": size,
        "maxContains": size,
        "unevaluatedItems": inner,
        "unevaluatedProperties": inner,
        "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        "patternProperties": st.dictionaries(st.sampled_from(("^a", "b$")), inner, max_size=1),
        "additionalProperties": inner,
        "required": names,
        "minProperties": size,
        "maxProperties": size,
        "propertyNames": inner,
        "dependentRequired": st.dictionaries(st.sampled_from(NAMES), names, max_size=2),
        "dependentSchemas": st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
        "allOf": some,
        "anyOf": some,
        "oneOf": some,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "$ref": st.sampled_from(("#/$defs/p", "#/$defs/q", "#")),
        "$dynamicRef": st.sampled_from(("#/$defs/p", "#")),
    }


def _schema(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keywords = _keywords(inner)

    @st.composite
    def draw_schema(draw: st.DrawFn) -> Any:
        chosen = draw(st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True))
        return {keyword: draw(keywords[keyword]) for keyword in chosen}

    return draw_schema()


schemas = st.recursive(st.one_of(st.booleans(), st.just({})), _schema, max_leaves=8)


def slow_schema(number: int) -> str:
    """Intersections double at each of many levels: far more than any time allows. Differs by its number."""
    levels: dict[str, Any] = {
        f"d{level}": {
            "type": "object",
            "properties": {
                side: {"$ref": f"#/$defs/d{level + 1}", "type": "object", "title": f"{number}"}
                for side in "ab"
            },
        }
        for level in range(40)
    }
    levels["d40"] = {"type": "object", "minProperties": number}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": levels})


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A schema with two definitions."""
    body = draw(_schema(schemas))
    return {**body, "$defs": {"p": draw(schemas), "q": draw(schemas)}}
