"""Output as a model reads it: decoded, and cut in the middle to a number of characters."""

from __future__ import annotations


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters and a note: the head and the tail, with how much is missing between them."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    return f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[len(text) - tail :]}"
