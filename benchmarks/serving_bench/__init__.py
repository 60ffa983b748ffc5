"""What the serving benchmarks share: model folders of a shape, servers, timed requests, reports."""
