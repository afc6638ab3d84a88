"""The embedded engine: transformers on the CPU behind SGLang's HTTP protocol, so that a laptop can generate.

- HTTP: `server` (routes), `protocol` (what requests may say), `responses` (what answers say), `gate` (who may pass
  while the engine is paused or updated), `service` (from HTTP to the scheduler and back)
- weights over HTTP: `weight_routes`, `weight_protocol`, `weight_service` likewise, `groups` (broadcasts),
  `wire_tensors` (buckets and pickles)
- decoding: `scheduler` (the thread), `batch` (the sequences that run), `parked` (those that may be continued),
  `request` (one of them), `sampler` (logits to tokens)
- the model: `forward` (one pass), `decoder` (with its cache), `fixed_shapes` (the deterministic decoder), `kv_cache`,
  `weights` (loading, replacing, checksums)
- `engine` puts them together, `options` says how
"""
