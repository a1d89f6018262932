//! Black-box tests of the models crate.

mod gpt;
mod llama;
mod pytorch;

mod safetensors;
mod text;
mod tokens;
mod weights;
