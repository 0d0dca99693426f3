"""The program uses its own profiler: sys.setprofile, sys.settrace, cProfile or torch.profiler."""

import cProfile
import os
import pstats
import sys

# At the default level, torch's profiler prints times, which differ between runs.
os.environ["KINETO_LOG_LEVEL"] = "99"

import torch
from small import IDS, Net, Simple, Stack, show, vectors

OWN = {"forward", "_split_heads", "_merge_heads", "apply_rotary_pos_emb", "rotate_half"}
calls = []


def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_name in OWN and frame.f_globals.get("__name__") == "small":
        calls.append(frame.f_code.co_name)


def trace(frame, event, argument):
    profile(frame, event, argument)


net, stack = Net().eval(), Stack(Simple).eval()
with torch.no_grad():
    for step in range(4):
        show(step, net(IDS), stack(vectors()))
        sys.setprofile(profile)
        net(IDS)
        sys.setprofile(None)
        sys.settrace(trace)
        net(IDS)
        sys.settrace(None)
        print(len(calls), calls[-12:], sys.getprofile(), sys.gettrace())
        own = cProfile.Profile()
        own.runcall(net, IDS)
        stats = pstats.Stats(own).stats
        print(sorted((key[2], value[0]) for key, value in stats.items() if key[0].endswith("small.py")))
        with torch.profiler.profile() as profiler:
            net(IDS)
        print(sorted((event.key, event.count) for event in profiler.key_averages() if event.key.startswith("aten::")))
