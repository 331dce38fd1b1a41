"""The paged KV pool: who owns which block, what can be found again, where the tensors are."""
