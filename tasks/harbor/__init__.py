"""Task folders of Harbor and Terminal-Bench, run as they are."""
