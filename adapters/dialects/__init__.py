"""Wire formats of model APIs, one module each, as pure functions between JSON and the engine's messages."""
