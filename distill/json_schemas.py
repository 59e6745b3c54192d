"""Checks by JSON schemas, of tools' arguments and of answers. Only this module imports jsonschema.

The author of a tool may write any schema: no reference is fetched, no check of arguments raises,
and a schema that cannot be checked counts as a mismatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend, validator_for
from jsonschema_specifications import REGISTRY
from referencing import Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from distill.errors import DataError, first_line
from distill.json_values import loads

# A pattern may take exponential time, and blocks all episodes of its process.
_PATTERN_TIMEOUT_S = 1.0
_LONGEST_COMPLAINT = 300
# One value of each JSON type.
_SAMPLES = (None, True, 0.5, "", [], {})


def mismatch(value: object, schema: Mapping[str, Any]) -> str | None:
    """The reason why `value` does not fit `schema`; None if it does."""
    try:
        wrong = best_match(_errors(value, schema))
    except Exception as error:  # a malformed schema makes jsonschema raise errors of any kind
        reason = f"the schema cannot be checked: {type(error).__name__}: {first_line(error)}"
        return reason[:_LONGEST_COMPLAINT]
    if wrong is None:
        return None
    where = ".".join(str(part) for part in wrong.absolute_path)
    return f"{f'{where}: ' if where else ''}{wrong.message[:_LONGEST_COMPLAINT]}"


def value_of_text(text: str, parsed: object, name: str, schema: Mapping[str, Any]) -> object:
    """Value of the argument `name`: either `text`, or `parsed`, which `text` encodes as JSON.

    The schema decides. If it accepts both, the value is `parsed`, provided that the schema
    restricts the type at all and `parsed` is no text itself: templates write texts without quotes,
    so quotes are part of the text. If it accepts neither, the value is `parsed` for an object or
    array and else `text`, which makes the error more informative.
    """
    if _accepts(name, text, schema):
        if isinstance(parsed, str):
            return text
        tells_types = not all(_accepts(name, sample, schema) for sample in _SAMPLES)
        return parsed if tells_types and _accepts(name, parsed, schema) else text
    return parsed if isinstance(parsed, dict | list) or _accepts(name, parsed, schema) else text


def _accepts(name: str, value: object, schema: Mapping[str, Any]) -> bool:
    """True if the schema of an object takes `value` as its property `name`."""
    try:
        errors = list(_errors({name: value}, schema))
    except Exception:  # as in `mismatch`, which reports it when the call is checked
        return False
    return not any(error.absolute_path and error.absolute_path[0] == name for error in errors)


def _errors(value: object, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    draft = validator_for(schema, default=Draft202012Validator)
    # The registry contains the drafts only, so that no reference is fetched.
    return _with_unicode_patterns(draft)(dict(schema), registry=REGISTRY).iter_errors(value)


@lru_cache
def _with_unicode_patterns(draft: Any) -> Any:
    """The draft's validator with the regular expressions of ECMAScript, such as `\\p{L}`."""
    return extend(draft, {"pattern": _pattern})


def _pattern(
    validator: Any, pattern: str, instance: object, schema: object
) -> Iterator[ValidationError]:
    del validator, schema
    if isinstance(instance, str):
        found = regex.search(pattern, instance, timeout=_PATTERN_TIMEOUT_S)
        if found is None:
            yield ValidationError(f"{instance!r} does not match {pattern!r}")


@lru_cache(maxsize=256)
def own_schema(answer: str) -> Draft202012Validator:
    """Validator of a schema that refers only to itself and to the drafts of JSON Schema.

    Raises:
        DataError: the text is not such a schema.
    """
    try:
        schema = loads(answer)
        Draft202012Validator.check_schema(schema)
        resource = DRAFT202012.create_resource(schema)
        root = REGISTRY.with_resource("", resource)
        _check_references(resource, root.crawl().resolver_with_root(resource))
    except Unresolvable as error:
        raise DataError(
            f"the answer {answer[:80]!r} is not a self-contained JSON schema: it refers to "
            f"{error.ref!r}, which it does not contain, and references are not fetched",
            field="answer",
        ) from error
    except (ValueError, TypeError, SchemaError, RecursionError) as error:
        raise DataError(
            f"the answer {answer[:80]!r} is not a JSON schema: {error}", field="answer"
        ) from error
    return Draft202012Validator(schema, registry=REGISTRY)


def _check_references(schema: Resource, resolver: Any) -> None:
    if isinstance(schema.contents, dict):
        for name in ("$ref", "$dynamicRef"):
            if isinstance(target := schema.contents.get(name), str):
                found = resolver.lookup(target).contents
                if not isinstance(found, dict | bool):
                    raise ValueError(f"{name} {target!r} is {str(found)[:80]!r}, not a schema")
    for part in schema.subresources():
        _check_references(part, resolver.in_subresource(part))
