"""What arrives at a server and what became of it: workloads, traces, records of requests.

Shared by the simulator, the clients and the reports; needs the standard library alone.
"""
