"""Steps as CUDA graphs: torch's own operations, recorded once and replayed by one launch for many steps."""
