//! GPT, GPT-2 and Llama as plain Burn modules, weights on disk, and text to train on.
//!
//! - [`GptConfig`] and [`Gpt`]: a GPT-2 style decoder with an untied head. Parameter names in files follow the fields
//!   of [`Gpt`].
//! - [`LlamaConfig`] and [`Llama`]: a decoder with RMS norms, rotary positions, gated MLPs and grouped key and value
//!   heads. Its [`LlamaVariant`] makes it a model of another [`Family`], such as Qwen 3 or Gemma 2.
//! - [`Gpt2Config`] and [`Gpt2`]: GPT-2 as published, with Hugging Face's names.
//! - [`EncoderLmConfig`] and [`EncoderLm`]: a language model of Burn's unmodified layers, for measurements and
//!   experiments.
//! - [`GptConfig::preset`], [`LlamaConfig::preset`]: configurations that are named by their approximate number of
//!   parameters.
//! - [`Architecture::parameters`]: the table of a model's parameters, with their names and shapes in the module and in
//!   files for other programs. [`WeightsFile`] uses it to read safetensors, as a whole or in part. [`Gpt::save`],
//!   [`Llama::save`] and [`Gpt2::save`] use it to write them. [`write_initial_weights`] writes the initial weights for
//!   training, and [`write_weights`] any values. [`LlamaConfig::from_hugging_face`] and [`Gpt2Config::from_hugging_face`] read configurations. Loaded
//!   files are not trusted.
//! - [`fused`]: the operations with handwritten gradients, and their form in graphs.
//! - [`LanguageModel`] and [`KeyValueCache`]: the common interface of [`Gpt`], [`Llama`] and [`Gpt2`], block by block,
//!   and generation that computes only new tokens.
//! - [`ByteText`], [`TokenStream`] and [`Batches`]: text as bytes, divided into batches; [`Tokenizer`]: text in the
//!   tokens of a `tokenizer.json`.
//!
//! The crate is independent of ranks and shards. A caller that divides a batch among workers selects the rows of each.
//!
//! ```
//! use burn::optim::{AdamWConfig, GradientsParams};
//! use burn::tensor::Device;
//! use burn_fsdp_models::{Batches, GptConfig, ModelError, TokenStream};
//!
//! # fn main() -> Result<(), ModelError> {
//! let config = GptConfig { layers: 1, dim: 8, heads: 2, vocab: 16, seq: 4 };
//! let device = Device::flex().autodiff();
//! let mut model = config.init(&device, 1)?;
//! let mut optimizer = AdamWConfig::new().init();
//! let stream = TokenStream::Synthetic { vocab: config.vocab };
//! let batches = Batches { stream, batch: 2, seq: config.seq };
//! for step in 0..3 {
//!     let (inputs, targets) = batches.rows(step, 0..2).to_tensors(&device);
//!     let gradients = model.loss(inputs, targets).backward();
//!     let gradients = GradientsParams::from_grads(gradients, &model);
//!     model = optimizer.step(1e-2, model, gradients);
//! }
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod architecture;
mod config;
mod decode_rows;
mod decoding;
mod encoder_lm;
mod encoding;
mod end_of_text;
mod error;
mod family;
pub mod fused;
mod gpt;
mod gpt2;
mod gpt2_json;
mod header;
mod hugging_face;
mod initial;
mod initial_weights;
mod key_values;
mod known_settings;
mod language_model;
mod llama;
mod llama_block;
mod llama_config;
mod llama_json;
mod llama_table;
mod llama_to_json;
mod llama_variant;
mod norm;
mod positions;
mod presets;
mod remark;
mod rope_json;
mod rope_scaling;
mod rotary;
mod saving;
mod settings;
mod stored;
mod table;
mod targets;
mod text;
mod text_reader;
mod token_text;
mod tokenizer;
mod tokens;
mod weight_folder;
mod weight_writer;
mod weights;

pub use architecture::{Architecture, ModelConfig};
pub use config::GptConfig;
pub use decode_rows::{DecodeRows, RowsForm};
pub use decoding::{DecodeInputs, Decoded, decode};
pub use encoder_lm::{EncoderLm, EncoderLmConfig};
pub use error::ModelError;
pub use family::Family;
pub use gpt::{Block, Gpt};
pub use gpt2::{Gpt2, Gpt2Block, Gpt2Config, Gpt2Shared};
pub use initial_weights::write_initial_weights;
pub use key_values::{Continuation, KeyValueCache, KeyValues};
pub use language_model::LanguageModel;
pub use llama::Llama;
pub use llama_block::{LlamaBlock, LlamaShared};
pub use llama_config::LlamaConfig;
pub use llama_variant::{Activation, AttentionScores, Biases, LlamaVariant, SlidingWindow};
pub use positions::{InputTokens, Positions, Sequences};
pub use remark::{Remark, Remarks};
pub use rope_scaling::{RopeFactors, RopeScaling};
pub use table::ParameterSpec;
pub use targets::Targets;
pub use text::{BYTE_VOCAB, ByteText};
pub use text_reader::Unread;
pub use token_text::TokenText;
pub use tokenizer::{TextCodec, Tokenizer};
pub use tokens::{Batches, Rows, TokenRange, TokenStream};
pub use weight_writer::write_weights;
pub use weights::WeightsFile;
