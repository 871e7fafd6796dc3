"""What benchmarks of a served pair share: traffic, load, processes to kill, hosts and nodes."""
