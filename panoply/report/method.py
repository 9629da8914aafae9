"""What a stored plan says of its method: the equation, and what was changed from how it is published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from panoply.errors import PanoplyError


def described(plan: Mapping[str, Any]) -> dict[str, Any]:
    """`equation` (lines), `against` (a method's name) and `changes` (path, there, here).

    Nothing where the method, or a part of it, is not registered here: a plug-in's, or another version's.
    """
    from panoply import compose

    stored = plan.get("method")
    if not isinstance(stored, Mapping):
        return {}
    name = str(stored.get("id", ""))
    try:
        method = compose.method_from_json({k: v for k, v in stored.items() if k != "id"})
        published = compose.resolve(name).method
        changes = [[path, b or "–", a or "–"] for path, a, b in method.diff(published)]
    except (PanoplyError, LookupError, TypeError, ValueError, AttributeError):
        return {}
    return {"equation": list(method.equation()), "against": name.split("@")[0], "changes": changes}
