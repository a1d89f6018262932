//! Black-box tests of the models crate.

mod cards;
mod decode_rows;
mod documents;
mod families;
mod foreign;
mod gpt;
mod hugging_face;
mod key_values;
mod llama;
mod pytorch;
mod ranges;
mod requests;

mod safetensors;
#[path = "../../../collectives/tests/skipped/mod.rs"]
mod skipped;
mod text;
mod tokenizer;
mod tokens;
mod weight_folder;
mod weights;
