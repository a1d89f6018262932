//! The tokens to train and to evaluate on.

use burn_fsdp_models::{Batches, ByteText, ModelConfig, TextCodec, TokenStream, TokenText};

use crate::args::DataArgs;
use crate::error::InputError;
use crate::text::tokenizer_identity;

/// Maximum bytes of text that are read: far more than a run on a CPU uses, and little memory.
const MAX_TEXT_BYTES: usize = 16 << 20;

/// The source of tokens.
#[derive(Debug)]
pub(crate) enum Data {
    /// Computed tokens, the same on every machine.
    Synthetic,
    /// Text that was read, with a part held out.
    Text(Box<Text>),
}

/// Text that was read.
#[derive(Debug)]
pub(crate) struct Text {
    bytes: ByteText,
    /// The text in the tokens of a tokenizer, if it is not read as bytes.
    tokens: Option<TokenText>,
    pub(crate) codec: TextCodec,
}

impl Text {
    fn training(&self) -> TokenStream {
        let tokens = self.tokens.as_ref();
        tokens.map_or_else(|| self.bytes.training(), TokenText::training)
    }

    pub(crate) fn held_out(&self) -> TokenStream {
        let tokens = self.tokens.as_ref();
        tokens.map_or_else(|| self.bytes.held_out(), TokenText::held_out)
    }
}

impl Data {
    /// Reads the text that the arguments name, and checks that it is enough for a step of `batch` sequences of `seq` tokens.
    pub(crate) fn read(
        args: &DataArgs,
        codec: TextCodec,
        model: &ModelConfig,
        [batch, seq]: [usize; 2],
    ) -> Result<Self, InputError> {
        if args.synthetic {
            return Ok(Self::Synthetic);
        }
        codec.check_vocab(model.vocab())?;
        let (bytes, source_name) = match &args.data {
            Some(path) => (
                ByteText::read(path, MAX_TEXT_BYTES)?,
                path.display().to_string(),
            ),
            None => (ByteText::crate_sources()?, "the sources of Burn".to_owned()),
        };
        let tokens = match &codec {
            TextCodec::Bytes => None,
            TextCodec::Tokenizer(tokenizer) => Some(bytes.tokenized(tokenizer)?),
        };
        let text = Text {
            bytes,
            tokens,
            codec,
        };
        let found = text.training().period().unwrap_or(usize::MAX);
        let needed = (batch * seq).saturating_add(1);
        if found < needed {
            return Err(InputError::TextShorterThanStep {
                source_name,
                found,
                tokens: match text.codec {
                    TextCodec::Bytes => "bytes",
                    TextCodec::Tokenizer(_) => "tokens",
                },
                needed,
                batch,
                seq,
            });
        }
        Ok(Self::Text(Box::new(text)))
    }

    /// Returns the batches to train on: windows of the text, drawn by the seed.
    pub(crate) fn training(&self, vocab: usize, [batch, seq]: [usize; 2], seed: u64) -> Batches {
        let stream = match self {
            Self::Synthetic => TokenStream::Synthetic { vocab },
            Self::Text(text) => match text.training() {
                TokenStream::Text(tokens) => TokenStream::Windows { tokens, seed },
                other => other,
            },
        };
        Batches { stream, batch, seq }
    }

    /// Returns the batches to evaluate on; `None` for synthetic tokens.
    pub(crate) fn held_out(&self, [batch, seq]: [usize; 2]) -> Option<Batches> {
        match self {
            Self::Synthetic => None,
            Self::Text(text) => Some(Batches {
                stream: text.held_out(),
                batch,
                seq,
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
        for part in text.bytes.parts() {
            hasher.update(part);
        }
        format!(
            "{} bytes of text with checksum {:08x}",
            text.bytes.num_bytes(),
            hasher.finalize()
        )
    }

    /// Describes the tokens of the text by the tokenizer; `None` for bytes and synthetic tokens.
    pub(crate) fn tokenizer(&self) -> Option<String> {
        match self {
            Self::Synthetic => None,
            Self::Text(text) => tokenizer_identity(&text.codec),
        }
    }

    /// Returns warnings about the text.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let Self::Text(text) = self else {
            return Vec::new();
        };
        let mut warnings = Vec::new();
        if text.bytes.num_skipped() > 0 {
            warnings.push(format!(
                "{} files or folders of the text could not be read and were skipped",
                text.bytes.num_skipped()
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
                let (bytes, files) = (text.bytes.num_bytes(), text.bytes.num_files());
                write!(f, "{bytes} bytes of text in {files} files, ")?;
                if let Some(tokens) = &text.tokens {
                    let parts = [tokens.training(), tokens.held_out()];
                    let tokens = parts.iter().filter_map(TokenStream::period);
                    write!(f, "{} tokens, ", tokens.sum::<usize>())?;
                }
                match text.bytes.num_held_out() {
                    0 => f.write_str("the last 5 % held out"),
                    held_out => write!(f, "{held_out} of them held out"),
                }
            }
        }
    }
}
