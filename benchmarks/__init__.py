"""Programs that compare with TRL and diffusers, measure on a GPU, and inject faults."""
