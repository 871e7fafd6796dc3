"""Messages between orchestrators and engines over a link, by version."""
