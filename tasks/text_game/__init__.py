"""The task ``text_game``: generated text adventures, played turn by turn."""
