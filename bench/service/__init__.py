"""What the service adds to its engines: time outside the models, links, proxy, network."""
