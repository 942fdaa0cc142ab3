"""Where bins come from: prepared trials, a WebSocket, Lab Streaming Layer, Redis."""
