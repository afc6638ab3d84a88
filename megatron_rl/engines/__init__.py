"""Generation servers: whatever speaks SGLang's HTTP protocol. Nothing here knows of training, rewards or Megatron."""
