"""Benchmarks of the service around its engines: time outside the models, links, proxy, network."""
