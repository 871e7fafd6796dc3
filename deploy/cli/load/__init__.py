"""`outrider bench`: puts load on a running service, and reports latency and throughput as callers see them.

    options      the options of the command
    prompts      the content of requests
    callers      the interface to a service, by gRPC; `http_caller` by HTTP
    driver       open and closed loop: sends requests, reads their streams, cancels some
    records      one request as its caller saw it
    summary      percentiles, goodput and rates of all requests
    report       the table and the JSON file
    command      runs these; shows the progress bar

Knows clients and time; must not know the internals of the service.
"""

from deploy.cli.load.command import bench
from deploy.cli.load.options import BenchOptions

__all__ = ["BenchOptions", "bench"]
