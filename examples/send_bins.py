"""Send a validation trial of a store to `arcuate live`, as a rig would.

python examples/send_bins.py websocket STORE ws://127.0.0.1:8765/frames    # arcuate live RUN --source socket
python examples/send_bins.py lsl STORE arcuate                             # --source lsl:arcuate
python examples/send_bins.py redis STORE redis://127.0.0.1:6379            # --source redis:neural_bins
"""

import asyncio
import json
import sys
import time

from arcuate.data.store import Store

BIN_S = 0.02


def first_trial(store):
    return next(trial for trial in store.trials if trial.split == "val")


def send_websocket(store, url):
    asyncio.run(_send_websocket(store, url))


async def _send_websocket(store, url):
    import websockets

    from arcuate.live.sources.socket import pack_bins

    trial = first_trial(store)
    async with websockets.connect(url) as rig:
        await rig.send(json.dumps({"type": "mark", "trial": trial.id, "session": trial.session}))
        for number, row in enumerate(store.read_bins(trial)):
            await rig.send(pack_bins(row[None], first=number))
            await asyncio.sleep(BIN_S)
        await rig.send('{"type": "end"}')


def send_lsl(store, name):
    import pylsl

    outlet = pylsl.StreamOutlet(pylsl.StreamInfo(name, "bins", store.n_channels, 50, pylsl.cf_float32, name))
    outlet.wait_for_consumers(60)
    time.sleep(1)  # a new consumer misses the first samples
    for row in store.read_bins(first_trial(store)):
        outlet.push_sample(row.tolist())
        time.sleep(BIN_S)
    time.sleep(1)  # until the last samples have arrived


def send_redis(store, url, stream="neural_bins"):
    import redis

    client = redis.Redis.from_url(url)
    for number, row in enumerate(store.read_bins(first_trial(store))):
        client.xadd(stream, {"bins": row.tobytes(), "first": number}, maxlen=10000)
        time.sleep(BIN_S)
    client.xadd(stream, {"end": 1})


if __name__ == "__main__":
    senders = {"websocket": send_websocket, "lsl": send_lsl, "redis": send_redis}
    kind, path, address = sys.argv[1:]
    senders[kind](Store.open(path), address)
