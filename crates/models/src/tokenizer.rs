//! Tokenizers in Hugging Face's form, and text in their tokens.

use std::fs::File;
use std::hash::Hasher;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use siphasher::sip::SipHasher13;

use crate::{BYTE_VOCAB, ByteText, ModelError, TokenRange, TokenStream};

/// Largest `tokenizer.json` that is read; those of 256 thousand tokens have some 30 MB.
const MAX_BYTES: u64 = 256 << 20;

/// Bytes of text that are tokenized at once, but for the rest of a line: what is kept beside a token while it is made takes
/// many times its bytes.
const PIECE_BYTES: usize = 64 << 10;

/// Number of pieces that are tokenized side by side.
const PIECES_AT_ONCE: usize = 16;

/// A tokenizer of a `tokenizer.json`, as Hugging Face's models come with.
///
/// What such a file says of cutting and filling up sequences is left out: text is never cut in silence.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Box<tokenizers::Tokenizer>,
    path: PathBuf,
    num_ids: usize,
    checksum: u64,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is no tokenizer.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, ModelError> {
        let path = path.into();
        let bytes = read(&path)?;
        let refused = |problem: String| ModelError::NotATokenizer {
            path: path.clone(),
            problem,
        };
        let inner = caught(|| {
            let mut inner = tokenizers::Tokenizer::from_bytes(&bytes)?;
            inner.with_padding(None);
            inner.with_truncation(None)?;
            // A file that names tokens which it has not shows that when these are put in front of a text.
            inner.encode_fast("", true)?;
            Ok(inner)
        });
        let inner = inner.map_err(refused)?;
        let Some(last) = inner.get_vocab(true).into_values().max() else {
            return Err(refused("it has no tokens".to_owned()));
        };
        let mut hasher = SipHasher13::new();
        hasher.write(&bytes);
        Ok(Self {
            inner: Box::new(inner),
            path,
            num_ids: last as usize + 1,
            checksum: hasher.finish(),
        })
    }

    /// Returns the file that it was read from.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the smallest number that is larger than all ids: a model needs as many tokens.
    #[must_use]
    pub fn num_ids(&self) -> usize {
        self.num_ids
    }

    /// Returns a checksum of the file, by which two tokenizers are told apart.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// Returns the ids of a text, after the tokens that the file puts in front of a text (`<s>`, say) if `is_begun`.
    ///
    /// # Errors
    ///
    /// If the tokenizer has no token for a part of the text, and none for what it does not know.
    pub fn encode(&self, text: &str, is_begun: bool) -> Result<Vec<u32>, ModelError> {
        let encoded = caught(|| self.inner.encode_fast(text, is_begun));
        let encoded = encoded.map_err(|problem| self.refused(problem))?;
        Ok(encoded.get_ids().to_vec())
    }

    /// Returns the text of ids, without the tokens that stand for no text.
    ///
    /// # Errors
    ///
    /// If the tokenizer cannot join them.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        let decoded = caught(|| self.inner.decode(ids, true));
        decoded.map_err(|problem| self.refused(problem))
    }

    /// Returns the ids of a long text, piece by piece.
    fn encode_pieces(&self, bytes: &[u8]) -> Result<Vec<u32>, ModelError> {
        let text = String::from_utf8_lossy(bytes);
        let mut ids = Vec::new();
        for some in pieces(&text).chunks(PIECES_AT_ONCE) {
            let encoded = caught(|| self.inner.encode_batch_fast(some.to_vec(), false));
            for piece in encoded.map_err(|problem| self.refused(problem))? {
                ids.extend_from_slice(piece.get_ids());
            }
        }
        Ok(ids)
    }

    fn refused(&self, problem: String) -> ModelError {
        ModelError::Tokenize {
            path: self.path.clone(),
            problem,
        }
    }
}

/// Runs a part of the tokenizer, which panics at some files that do not fit together.
fn caught<T>(body: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("its parts do not fit together".to_owned()),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ModelError> {
    let file_error = |source| ModelError::File {
        path: path.to_owned(),
        source,
    };
    // Before opening: opening a pipe would wait for somebody to write to it.
    let metadata = path.metadata().map_err(file_error)?;
    if !metadata.is_file() || metadata.len() > MAX_BYTES {
        return Err(ModelError::NotATokenizer {
            path: path.to_owned(),
            problem: format!("it is no regular file of at most {MAX_BYTES} bytes"),
        });
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(file_error)?;
    file.take(MAX_BYTES)
        .read_to_end(&mut bytes)
        .map_err(file_error)?;
    Ok(bytes)
}

/// Cuts a text at ends of lines, or of characters where a line is longer than a piece should be.
fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while rest.len() > PIECE_BYTES {
        let least = rest.ceil_char_boundary(PIECE_BYTES);
        let most = rest.ceil_char_boundary(2 * PIECE_BYTES);
        let line = rest[least..most].find('\n');
        let (piece, after) = rest.split_at(line.map_or(most, |end| least + end + 1));
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}

/// Text in the tokens of a tokenizer, a part of it held out for evaluation.
#[derive(Clone, Debug)]
pub struct TokenText {
    training: TokenRange,
    held_out: TokenRange,
}

impl TokenText {
    /// Returns the stream of the tokens to train on.
    #[must_use]
    pub fn training(&self) -> TokenStream {
        TokenStream::Text(self.training.clone())
    }

    /// Returns the stream of the tokens to evaluate on.
    #[must_use]
    pub fn held_out(&self) -> TokenStream {
        TokenStream::Text(self.held_out.clone())
    }
}

impl ByteText {
    /// Returns the text in the tokens of a tokenizer, with the same bytes held out. Bytes that are not UTF-8 are replaced.
    ///
    /// Each part is tokenized in pieces of some 64 KiB that end with a line, and nothing is put in front of them.
    ///
    /// # Errors
    ///
    /// If the tokenizer has no token for a part of the text, or none for a whole part.
    pub fn tokenized(&self, tokenizer: &Tokenizer) -> Result<TokenText, ModelError> {
        let part = |bytes: &[u8]| {
            let ids = tokenizer.encode_pieces(bytes)?;
            TokenRange::of_ids(ids.into()).ok_or_else(|| ModelError::Tokenize {
                path: tokenizer.path.clone(),
                problem: format!("of {} bytes of text it makes no token", bytes.len()),
            })
        };
        let [training, held_out] = self.parts();
        Ok(TokenText {
            training: part(training)?,
            held_out: part(held_out)?,
        })
    }
}

/// The way between text and the tokens of a model.
#[derive(Debug, Clone)]
pub enum TextCodec {
    /// Each byte is a token.
    Bytes,
    /// The tokens of a tokenizer.
    Tokenizer(Tokenizer),
}

impl TextCodec {
    /// Returns the number of tokens that a model needs at least.
    #[must_use]
    pub fn num_ids(&self) -> usize {
        match self {
            Self::Bytes => BYTE_VOCAB,
            Self::Tokenizer(tokenizer) => tokenizer.num_ids(),
        }
    }

    /// Checks that a model of `vocab` tokens has all of them.
    ///
    /// # Errors
    ///
    /// [`ModelError::VocabTooSmall`] for bytes, [`ModelError::TooManyIds`] for a tokenizer.
    pub fn check_vocab(&self, vocab: usize) -> Result<(), ModelError> {
        match self {
            _ if self.num_ids() <= vocab => Ok(()),
            Self::Bytes => Err(ModelError::VocabTooSmall { vocab }),
            Self::Tokenizer(tokenizer) => Err(ModelError::TooManyIds {
                path: tokenizer.path.clone(),
                num_ids: tokenizer.num_ids,
                vocab,
            }),
        }
    }

    /// Returns the tokens of the beginning of a text.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::encode`].
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, ModelError> {
        match self {
            Self::Bytes => Ok(text.bytes().map(i64::from).collect()),
            Self::Tokenizer(tokenizer) => {
                let ids = tokenizer.encode(text, true)?;
                Ok(ids.into_iter().map(i64::from).collect())
            }
        }
    }

    /// Returns the text of tokens. Bytes need not be UTF-8.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::decode`].
    pub fn decode(&self, tokens: &[i64]) -> Result<Vec<u8>, ModelError> {
        match self {
            Self::Bytes => Ok(tokens.iter().map(|token| *token as u8).collect()),
            Self::Tokenizer(tokenizer) => {
                let ids: Vec<u32> = tokens.iter().map(|token| *token as u32).collect();
                Ok(tokenizer.decode(&ids)?.into_bytes())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{PIECE_BYTES, pieces};

    #[test]
    fn pieces_end_with_lines_and_are_the_text() {
        let lines: String = (0..40_000).map(|line| format!("{line} äöü\n")).collect();
        let long = "ä".repeat(3 * PIECE_BYTES);
        for text in [&lines[..], &long, "", "short"] {
            let pieces = pieces(text);
            assert_eq!(pieces.concat(), text);
            assert!(
                pieces
                    .iter()
                    .all(|piece| piece.len() <= 2 * PIECE_BYTES + 3)
            );
        }
        let of_lines = pieces(&lines);
        assert!(of_lines.len() > 5);
        assert!(of_lines.iter().all(|piece| piece.ends_with('\n')));
    }
}
