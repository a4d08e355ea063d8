"""String in, token out: the HTTP gateway, its sessions, and the codec between chat messages and token ids."""
