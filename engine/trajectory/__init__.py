"""The turn tree of a session, and what it exports: ``tree`` is the door, ``types`` what comes out."""
