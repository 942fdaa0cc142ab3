"""Sources of bins: prepared trials, a WebSocket, Lab Streaming Layer, Redis."""
