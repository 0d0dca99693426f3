"""Settings of a model, measured in turns and compared, to keep the better one."""
