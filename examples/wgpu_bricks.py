"""Bricks on a wgpu device, timed by its timestamps without waiting for it: python examples/wgpu_bricks.py"""

import sys

try:
    import wgpu
except ImportError:
    sys.exit("this example needs wgpu: pip install 'cbtop[wgpu]'")

from cbtop import BrickId, BrickProfiler
from cbtop.profiler.instrument.wgpu_clock import WgpuClock

SIZE = 1024
SHADER = """
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(1) fn norm() {
    var squares = 0.0;
    for (var i = 0u; i < 1024u; i++) { squares += x[i] * x[i]; }
    for (var i = 0u; i < 1024u; i++) { x[i] = x[i] * inverseSqrt(squares / 1024.0 + 1e-6); }
}
@compute @workgroup_size(64) fn product(@builtin(global_invocation_id) at: vec3<u32>) {
    var sum = 0.0;
    for (var i = 0u; i < 1024u; i++) { sum += weight[1024u * at.x + i] * x[i]; }
    out[at.x] = sum;
}
"""

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
try:
    adapter = wgpu.gpu.request_adapter_sync()
except RuntimeError as error:
    sys.exit(f"this example needs an adapter for wgpu: {error}")
if "timestamp-query" not in adapter.features:
    sys.exit(f"this example needs timestamp queries, which {adapter.summary} does not have")
device = adapter.request_device_sync(required_features=["timestamp-query"])
clock = WgpuClock(device)
profiler = BrickProfiler(device_clock=clock)

buffers = [
    device.create_buffer(size=4 * count, usage="STORAGE")  # zeros
    for count in (SIZE, SIZE * SIZE, SIZE)
]
layout = device.create_bind_group_layout(
    entries=[
        {"binding": at, "visibility": "COMPUTE", "buffer": {"type": kind}}
        for at, kind in enumerate(("storage", "read-only-storage", "storage"))
    ]
)
group = device.create_bind_group(
    layout=layout, entries=[{"binding": at, "resource": {"buffer": buffer}} for at, buffer in enumerate(buffers)]
)
module = device.create_shader_module(code=SHADER)
norm, product = [
    device.create_compute_pipeline(
        layout=device.create_pipeline_layout(bind_group_layouts=[layout]),
        compute={"module": module, "entry_point": name},
    )
    for name in ("norm", "product")
]


def run(encoder, pipeline, groups):
    compute_pass = encoder.begin_compute_pass()
    compute_pass.set_pipeline(pipeline)
    compute_pass.set_bind_group(0, group)
    compute_pass.dispatch_workgroups(groups)
    compute_pass.end()


for _ in range(steps):
    with profiler.step("decode", tokens=1), profiler.layer(0), clock.encode() as encoder:
        with profiler.brick(BrickId.RMS_NORM, elements=SIZE):
            run(encoder, norm, 1)
        with profiler.brick(BrickId.DOWN_PROJECTION, elements=SIZE):
            run(encoder, product, SIZE // 64)
profiler.finalize()
print(profiler.report())
