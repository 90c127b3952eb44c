"""JSON as the engine's parser takes it: duplicate names are refused, and a cut text has its own error."""

from __future__ import annotations

import json
from typing import Any

from .errors import EngineError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise EngineError("DuplicateField")
    return result


def loads(data: bytes) -> Any:
    """Parse; raises EngineError UnexpectedEndOfInput, SyntaxError or DuplicateField."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EngineError("SyntaxError") from error
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        raise EngineError("UnexpectedEndOfInput" if cut else "SyntaxError") from error
