"""The execution graph: its nodes (layers, bricks, kernels), its edges, its analyses and its renderings."""
