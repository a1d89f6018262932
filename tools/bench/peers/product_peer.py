"""What matrix products of PyTorch reach: one JSON line.

    python product_peer.py [--threads N]

Square products of 32-bit floats, of width 768 and 2048; the best round of each, and the better of both.
"""
import argparse
import json
import time

import torch


def rate(width, rounds=7):
    a, b = torch.rand(width, width), torch.rand(width, width)
    out = torch.empty(width, width)
    torch.mm(a, b, out=out)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * width ** 3 / best


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps({
        "version": torch.__version__,
        "flop_per_s": max(rate(768), rate(2048)),
    }), flush=True)


if __name__ == "__main__":
    main()
