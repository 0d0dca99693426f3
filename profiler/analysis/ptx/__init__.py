"""Static analysis of PTX: a parser, control flow, dataflow and lints. It needs no GPU and no compiler."""
