"""What keeps a verifier honest: parts that ``tasks.leakage`` puts together."""
