"""Finds slow ranks. In each step all ranks wait for the slowest one, so the time of a step does not tell which it is.

stragglers = Stragglers(ranks)
if found := stragglers.look(loader):        # in every logged step, on every rank
    figures, line = found
"""

import socket
import statistics
import time

import torch
import torch.distributed as dist

from data.loader import Loader
from engine.parallel.ranks import Ranks

PRODUCTS = 10


class Stragglers:
    """Once a minute, every rank times products of its own, which wait for nobody, and tells how long it has waited for
    data since then."""

    EVERY = 60.0  # seconds

    def __init__(self, ranks: Ranks):
        self.ranks, self.since, self.hosts = ranks, time.monotonic(), [socket.gethostname()] * ranks.size
        if ranks.size > 1:
            dist.all_gather_object(self.hosts, self.hosts[0])
        n = 4096 if ranks.device.type == "cuda" else 512
        self.matrix = torch.ones(n, n, device=ranks.device, dtype=ranks.dtype)

    def seconds(self) -> float:
        """The time of PRODUCTS products on this rank, after one that is not timed."""
        for i in range(PRODUCTS + 1):
            if i == 1:
                getattr(torch, self.ranks.device.type).synchronize()
                start = time.perf_counter()
            self.matrix @ self.matrix
        getattr(torch, self.ranks.device.type).synchronize()
        return time.perf_counter() - start

    def look(self, loader: Loader) -> tuple[dict, str] | None:
        """Once a minute, the figures of all ranks for metrics.jsonl, in lists, and a line that names the slowest."""
        ranks, elapsed = self.ranks, time.monotonic() - self.since
        if not ranks.sum(torch.tensor(float(ranks.first and elapsed > self.EVERY))):  # the first rank's clock decides
            return None
        found = torch.zeros(2, ranks.size, dtype=torch.float64)
        found[:, ranks.rank] = torch.tensor([1000 * self.seconds() / PRODUCTS, loader.waited])
        products, waited = ranks.sum(found).tolist()
        self.since, loader.waited = time.monotonic(), 0.0
        slow, late, usual = products.index(max(products)), waited.index(max(waited)), statistics.median(products)
        return {"product_ms": products, "data_wait_s": waited}, (
            f"ranks: a product takes {usual:.3g} ms in the median, {products[slow] / usual:.2f} times as long on the "
            f"slowest, rank {slow} on {self.hosts[slow]}; rank {late} on {self.hosts[late]} has waited longest for "
            f"data, {waited[late]:.2f} of the last {elapsed:.0f} s"
        )
