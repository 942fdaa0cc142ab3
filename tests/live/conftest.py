"""Fixtures of the live tests: a Redis server and a Lab Streaming Layer confined to this machine."""

from support.live_parts import lsl, redis_url

__all__ = ["lsl", "redis_url"]
