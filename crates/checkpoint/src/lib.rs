//! Sharded checkpoints: format, plan, storage, index.
