"""A sandbox's way out: the proxy between agents and the world, its rules and its record."""
