"""tokens/s of what runs, in your own program: python examples/live_rates.py"""

import cbtop

for snapshot in cbtop.live(interval_s=1.0):
    for source in snapshot["sources"]:
        steps = source["steps"] or {}
        print(source["program"], steps.get("phase"), steps.get("tokens_per_sec"), flush=True)
