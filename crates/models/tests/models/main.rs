//! Black-box tests of the models crate.

mod gpt;
mod hugging_face;
mod llama;
mod pytorch;
mod ranges;

mod safetensors;
mod text;
mod tokens;
mod weight_folder;
mod weights;
