"""What tests of several folders share: how to wait, workloads, clusters to break, worlds to play in.

A test says `from kit.waiting import until`; nothing here is a test, and nothing here is imported by the product.
`slurm_cluster`, `ray_cluster` and `faulty_job` are also programs: they import nothing else from here at their top.
"""
