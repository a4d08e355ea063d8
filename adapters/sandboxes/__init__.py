"""Where agents act: sandbox backends behind the engine's Sandbox port."""
