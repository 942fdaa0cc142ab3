"""A live source that receives one bin per UDP packet: `arcuate live RUN --source examples.udp_source:Udp`.

python examples/udp_source.py 64    # sends 10 s of noise with 64 channels, to try it
"""

import socket
import sys
import time

import numpy as np

from arcuate.live.input import Chunk, Source

ADDRESS = ("127.0.0.1", 5005)


class Udp(Source):
    def __init__(self, n_channels, put):
        super().__init__("the UDP source")  # its name in messages
        self.n_channels, self.put = n_channels, put
        self.receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.receiver.bind(ADDRESS)
        self.receiver.settimeout(0.2)

    def _run(self):
        with self.receiver:
            while not self._stopped.is_set():
                try:
                    packet = self.receiver.recv(65536)
                except TimeoutError:
                    continue
                self.put(Chunk(np.frombuffer(packet, np.float32)[None]))


if __name__ == "__main__":
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    rng = np.random.default_rng(0)
    for _ in range(500):
        sender.sendto(rng.poisson(1.0, int(sys.argv[1])).astype(np.float32).tobytes(), ADDRESS)
        time.sleep(0.02)
