"""The execution graph: its nodes (layers, bricks, kernels), its edges, and its renderers."""
