"""The data path between orchestrators and engines: one connection from each orchestrator process to each engine.

Ray places, finds, watches and leases engines, and hands out with each grant where the engine listens and the key to it;
what travels every round goes over the link. Knows records and how they are encoded; must not know Ray, nor what state a
session is in.

    address     where a link leads to, and its key
    frames      bytes to frames, with a limit on their length
    handshake   version, and proof of the key
    tls         certificates of an end, where links are encrypted
    trees, requests, replies   core's records to protobuf and back
    server      the engine's end
    client      the orchestrator's end
"""
