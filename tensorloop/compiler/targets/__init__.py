"""From a step to something that runs: native code on a CPU, or torch's own operations."""
