"""The program freezes the clock with freezegun and moves it, and patches its own clock."""

import datetime
import time
from unittest import mock

import torch
from freezegun import freeze_time
from small import IDS, Net, show

model = Net().eval()


def generate():
    ids = IDS
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    show(ids)


generate()
with freeze_time("2020-01-01 12:00") as frozen:
    print(datetime.datetime.now(), time.perf_counter_ns() == time.perf_counter_ns(), time.time().hex())
    generate()
    frozen.tick(5)
    generate()
    frozen.move_to("2019-01-01")
    print(datetime.datetime.now(), time.monotonic() == time.monotonic())
    generate()
for _ in range(3):
    with freeze_time("2021-01-01", auto_tick_seconds=1):
        generate()
with mock.patch("time.perf_counter_ns", side_effect=ZeroDivisionError), mock.patch("time.time", return_value=0):
    generate()
print(datetime.datetime.now().year > 2020, time.perf_counter_ns.__module__)
generate()
