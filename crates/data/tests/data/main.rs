//! Tests of streams of training data.

mod chat;
mod errors;
mod files;
mod fuzz;
mod held_out;
mod oracle;
mod packing;
mod random;
mod resume;
mod tokenizers;
