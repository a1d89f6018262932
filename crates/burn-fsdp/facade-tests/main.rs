//! Tests of the facade that can share a process. They are one binary, because each binary compiles Burn's generic code
//! again.

mod common;
#[path = "../../spmd/tests/common/optimizers.rs"]
mod every;
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
mod low_bit_compiled;
mod offload;
mod optimizers;
mod owners;
mod pass_states;
mod resumes;
mod steps;
mod ties;
