"""The embedded engine: transformers on the CPU behind SGLang's HTTP protocol, so that a laptop can generate.

    server.py     routes and JSON            protocol.py  what requests may say     responses.py  what answers say
    gate.py       pausing, weight updates    service.py   from HTTP to the scheduler and back
    scheduler.py  the thread that decodes    batch.py     the sequences being decoded   request.py  one sequence
    decoder.py    model + KV cache           forward.py   one pass through the model    kv_cache.py its memory
    fixed_shapes.py  the deterministic decoder   sampler.py  logits to tokens           weights.py  loading, checksums
"""
