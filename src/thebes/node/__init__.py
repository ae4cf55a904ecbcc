"""What runs beside the GPUs: keeper, agent, job supervisor, suspend mechanisms, GPU discovery."""
