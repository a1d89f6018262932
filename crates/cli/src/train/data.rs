//! The tokens to train and to evaluate on.

use burn_fsdp_models::{BYTE_VOCAB, Batches, ByteText, GptConfig, ModelError, TokenStream};

use crate::args::DataArgs;
use crate::error::InputError;

/// Maximum bytes of text that are read: far more than a run on a CPU uses, and little memory.
const MAX_TEXT_BYTES: usize = 16 << 20;

/// The source of tokens.
#[derive(Debug)]
pub(crate) enum Data {
    /// Computed tokens, the same on every machine.
    Synthetic,
    /// Text that was read, with its end held out.
    Text(ByteText),
}

impl Data {
    /// Reads the text that the arguments name, and checks that it is enough for a step.
    pub(crate) fn read(
        args: &DataArgs,
        model: &GptConfig,
        batch: usize,
    ) -> Result<Self, InputError> {
        if args.synthetic {
            return Ok(Self::Synthetic);
        }
        if model.vocab < BYTE_VOCAB {
            let vocab = model.vocab;
            return Err(ModelError::VocabTooSmall { vocab }.into());
        }
        let (text, source_name) = match &args.data {
            Some(path) => (
                ByteText::read(path, MAX_TEXT_BYTES)?,
                path.display().to_string(),
            ),
            None => (ByteText::crate_sources()?, "the sources of Burn".to_owned()),
        };
        let found = text.training().period().unwrap_or(usize::MAX);
        let needed = (batch * model.seq).saturating_add(1);
        if found < needed {
            return Err(InputError::TextShorterThanStep {
                source_name,
                found,
                needed,
                batch,
                seq: model.seq,
            });
        }
        Ok(Self::Text(text))
    }

    /// Returns the batches to train on: windows of the text, drawn by the seed.
    pub(crate) fn training(&self, model: &GptConfig, batch: usize, seed: u64) -> Batches {
        let stream = match self {
            Self::Synthetic => TokenStream::Synthetic { vocab: model.vocab },
            Self::Text(text) => match text.training() {
                TokenStream::Bytes(bytes) => TokenStream::Windows { bytes, seed },
                other => other,
            },
        };
        Batches {
            stream,
            batch,
            seq: model.seq,
        }
    }

    /// Returns the batches to evaluate on; `None` for synthetic tokens.
    pub(crate) fn held_out(&self, model: &GptConfig, batch: usize) -> Option<Batches> {
        match self {
            Self::Synthetic => None,
            Self::Text(text) => Some(Batches {
                stream: text.held_out(),
                batch,
                seq: model.seq,
            }),
        }
    }

    /// Describes the tokens by size and checksum, so that two texts differ wherever they were read
    /// from.
    pub(crate) fn identity(&self) -> String {
        let Self::Text(text) = self else {
            return "synthetic tokens".to_owned();
        };
        let mut hasher = crc32fast::Hasher::new();
        for part in [text.training(), text.held_out()] {
            if let TokenStream::Bytes(bytes) = part {
                hasher.update(bytes.as_slice());
            }
        }
        format!(
            "{} bytes of text with checksum {:08x}",
            text.num_bytes(),
            hasher.finalize()
        )
    }

    /// Returns warnings about the text.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let Self::Text(text) = self else {
            return Vec::new();
        };
        let mut warnings = Vec::new();
        if text.num_skipped() > 0 {
            warnings.push(format!(
                "{} files or folders of the text could not be read and were skipped",
                text.num_skipped()
            ));
        }
        warnings
    }
}

/// Prints as `7000000 bytes of text in 700 files, 35 of them held out`, as `.. the last 5 % held out`, or as `synthetic
/// tokens`.
impl std::fmt::Display for Data {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Synthetic => f.write_str("synthetic tokens"),
            Self::Text(text) => {
                let (bytes, files) = (text.num_bytes(), text.num_files());
                write!(f, "{bytes} bytes of text in {files} files, ")?;
                match text.num_held_out() {
                    0 => f.write_str("the last 5 % held out"),
                    held_out => write!(f, "{held_out} of them held out"),
                }
            }
        }
    }
}
