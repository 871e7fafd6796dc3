"""The data path between orchestrators and engines: one connection from each orchestrator process to each engine.

Ray places, finds, watches and leases engines, and gives with each grant the engine's address and its key; the messages
of rounds go over the link. Knows records and their encoding; must not know Ray, nor the state of sessions.

    address     where a link leads to, and its key
    stream      frames with a message each, on a stream of bytes; sockets, and how a thread that computes writes to one
    handshake   version, and proof of the key
    tls         certificates of an end, where links are encrypted
    trees, requests, replies   core's records to protobuf and back
    server      the engine's end
    client      the orchestrator's end
"""
