"""What the model saw and said: the turn tree of a session, its fates, its ledger, its training arrays."""
