"""The execution graph: layers, bricks, kernels and what connects them; and its renderers."""
