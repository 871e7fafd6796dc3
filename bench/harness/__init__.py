"""Common parts of benchmarks of a served pair: traffic, load, processes to kill, hosts and nodes."""
