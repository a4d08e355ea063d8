"""Parsers of model text, one a family: text to reasoning, answer and tool calls, piece by piece."""
