"""What a run shows of itself: progress for people, metrics for machines, loop lag, recorded episodes."""
