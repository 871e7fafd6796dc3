"""`outrider bench`: load on a running service, and what its callers would see.

    options      what is asked for
    prompts      what they ask
    callers      how they are sent, by gRPC and by HTTP
    driver       when requests are sent; open and closed loop: sends, listens, cancels
    records      one request as its caller saw it
    summary      percentiles, goodput and rates of many
    command      puts these together; the bar, the table and the JSON file

Knows clients and time; must not know the service's inside.
"""

from deploy.cli.load.command import bench
from deploy.cli.load.options import BenchOptions

__all__ = ["BenchOptions", "bench"]
