#!/usr/bin/env python3
"""Sparse decode attention on the CPU: Lacuna beside PyTorch (gather + attention, same bf16 inputs, f32 arithmetic).

    compare_pytorch_cpu.py --lacuna build/cpu/src/cli/lacuna --threads 2 --csv OUT.csv --commit HASH

Wants PyTorch, so it is not part of CI. Both arms run in alternation, A B A, in one process tree on the same cores; each
call gets a fresh random list of distinct rows. PyTorch's number is the best of three ways to write it.
"""
import argparse
import csv
import datetime
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

H, D_QK, D_V, TOPK = 16, 576, 512, 2048


def by_sdpa(q, cache, rows, scale):
    k = cache[rows].float()  # [T, topk, d]
    return F.scaled_dot_product_attention(q.float()[:, None], k[:, None], k[:, None, :, :D_V], scale=scale)[:, 0]


def by_matmul(q, cache, rows, scale):
    k = cache[rows].float()
    p = torch.softmax(torch.matmul(q.float() * scale, k.transpose(1, 2)), -1)
    return torch.matmul(p, k[..., :D_V])


def by_index_select(q, cache, rows, scale):
    k = cache.index_select(0, rows.reshape(-1)).float().view(q.shape[0], TOPK, D_QK)
    p = torch.softmax(torch.bmm(q.float() * scale, k.transpose(1, 2)), -1)
    return torch.bmm(p, k[..., :D_V])


def time_torch(rows_count, context, repeats):
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(context, D_QK, generator=generator).bfloat16()
    q = torch.randn(rows_count, H, D_QK, generator=generator).bfloat16()
    lists = [torch.stack([torch.randperm(context, generator=generator)[:TOPK] for _ in range(rows_count)])
             for _ in range(16)]
    best = None
    for function in (by_sdpa, by_matmul, by_index_select):
        samples = []
        with torch.inference_mode():
            for i in range(repeats + 3):
                begin = time.perf_counter()
                function(q, cache, lists[i % len(lists)], D_QK ** -0.5)
                if i >= 3:
                    samples.append((time.perf_counter() - begin) * 1e6)
        median = statistics.median(samples)
        if best is None or median < best[1]:
            best = (function.__name__, median)
    return best


def time_lacuna(program, rows_count, context, threads, repeats):
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        subprocess.run([program, "bench", "attention", "--device", "cpu", "--heads", str(H), "--d-qk", str(D_QK),
                        "--topk", str(TOPK), "--rows", str(rows_count), "--context", str(context), "--dtype",
                        "bf16", "--threads", str(threads), "--repeats", str(repeats), "--csv", file.name], check=True,
                       stdout=subprocess.DEVNULL)
        with open(file.name) as text:
            lines = [line for line in text if not line.startswith("#")]
    row = next(csv.DictReader(lines))
    return row["kernel"], float(row["us_median"])


def processor():
    with open("/proc/cpuinfo") as file:
        found = re.search(r"model name\s*:\s*(.*)", file.read())
    return found.group(1) if found else platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lacuna", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--csv", required=True)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:args.threads])
    torch.set_num_threads(args.threads)
    with open(args.csv, "w") as out:
        out.write(f"# commit {args.commit}; {processor()}, {args.threads} threads; torch {torch.__version__}; "
                  f"{datetime.date.today()}\n")
        out.write("# median us of fresh random lists; PyTorch is the best of gather + SDPA, + matmul, + bmm; order "
                  "lacuna, torch, lacuna; ratio = torch / mean of the two lacuna medians\n")
        out.write("h_q,d_qk,topk,rows,context,kernel,us_lacuna_first,us_torch,torch_form,us_lacuna_second,ratio\n")
        for context in (4096, 65536):
            for rows_count in (1, 8):
                kernel, first = time_lacuna(args.lacuna, rows_count, context, args.threads, args.repeats)
                form, torch_us = time_torch(rows_count, context, args.repeats)
                _, second = time_lacuna(args.lacuna, rows_count, context, args.threads, args.repeats)
                ratio = torch_us / ((first + second) / 2)
                line = f"{H},{D_QK},{TOPK},{rows_count},{context},{kernel},{first:.1f},{torch_us:.1f},{form},{second:.1f},{ratio:.2f}"
                out.write(line + "\n")
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
