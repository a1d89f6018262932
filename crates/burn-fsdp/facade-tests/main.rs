//! Tests of the facade that can share a process. They are one binary, because each binary compiles Burn's generic code
//! again.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../../spmd/tests/common/optimizers.rs"]
mod every;
#[path = "../tests/common/fixed.rs"]
mod fixed;
#[path = "../tests/common/save.rs"]
mod saving;

mod batch_forms;
mod checkpointer;
mod compiled;
mod compiled_owners;
mod generation;
mod gpt;
mod hugging_face;
mod offload;
mod optimizers;
mod owners;
mod resumes;
mod steps;
mod ties;
