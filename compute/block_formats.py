"""The names of the block formats for weights, in the order that a user sees.

This file does not import the formats, so that `cbtop demo --help` does not wait for Numba.
"""

# Name of a format -> the module in `quantization` that defines it.
FORMAT_MODULES = {
    "F32": "floats",
    "F16": "floats",
    "BF16": "floats",
    "Q8_0": "q8_0",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q6_K": "q6_k",
    "Q5_K": "q5_k",
    "Q4_K": "q4_k",
    "Q3_K": "q3_k",
    "Q2_K": "q2_k",
    "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_xs",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "TQ2_0": "tq2_0",
    "Q1_0": "q1_0",
    "NF4": "nf4",
}
