"""What orchestrators and engines say to each other over a link, by version."""
