"""The data path between orchestrators and engines: one connection from each orchestrator process to each engine.

Ray places, finds, watches and leases engines. Each grant brings the engine's address and its key. The messages of
rounds go over the link. Knows records and their encoding; must not know Ray, nor the state of sessions.

    address     an engine's address and key
    stream      frames with one message each on a byte stream; sockets; writing from the engine's thread
    handshake   version, and proof of the key
    tls         certificates of one end, if links are encrypted
    trees, requests, replies   core's records to protobuf and back
    server      the engine's end
    client      the orchestrator's end
"""
