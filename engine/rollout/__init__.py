"""Running sessions in groups, and the bridge between thousands of generations and one engine."""
