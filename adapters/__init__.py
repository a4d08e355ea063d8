"""Everything that speaks to software others wrote: engines, sandboxes, tools, agents, wire dialects, parsers.

Knows the engine's ports, and neither tasks nor training.
"""
