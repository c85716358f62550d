"""How a model is spread over the ranks; all of it is torch's own: DDP, FSDP2, tensor parallel plans, pipelining."""
