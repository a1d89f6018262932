//! Tokenizers in the format of Hugging Face.

use std::fs::File;
use std::hash::Hasher;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde_json::Value;
use siphasher::sip::SipHasher13;
use tokenizers::models::ModelWrapper;
use tokenizers::{Encoding, PostProcessor, Token};

use crate::{BYTE_VOCAB, ModelError};

/// Maximum size of a `tokenizer.json`. A file with 256 thousand tokens has some 30 MB.
const MAX_BYTES: u64 = 256 << 20;

/// Keys of a `tokenizer.json` that affect neither tokens nor text.
const NO_RULES: [&str; 3] = ["version", "truncation", "padding"];

/// A tokenizer from a `tokenizer.json`, the file that comes with Hugging Face's models.
///
/// Truncation and padding in the file are ignored, so text is never silently cut. Dropout is also ignored, because it
/// would give the same text different tokens each time.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Box<tokenizers::Tokenizer>,
    path: PathBuf,
    num_ids: usize,
    hash: u64,
    checksum: u64,
    /// The tokens that are added before a text.
    front: Vec<u32>,
    /// The token for unknown text.
    unknown: Option<u32>,
}

/// A token, and the byte range of the text that it covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) id: u32,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is not a tokenizer.
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
            without_dropout(&mut inner);
            // If a file names tokens that it does not define, adding tokens before a text fails.
            inner.encode_fast("", true)?;
            let (front, hash) = (front_of(&inner)?, hash_of(&inner)?);
            Ok((inner, front, hash))
        });
        let (inner, front, hash) = inner.map_err(refused)?;
        let Some(last) = inner.get_vocab(true).into_values().max() else {
            return Err(refused("it has no tokens".to_owned()));
        };
        let mut hasher = SipHasher13::new();
        hasher.write(&bytes);
        Ok(Self {
            unknown: unknown_of(&inner),
            inner: Box::new(inner),
            path,
            num_ids: last as usize + 1,
            hash,
            checksum: hasher.finish(),
            front,
        })
    }

    /// Returns the file from which the tokenizer was read.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the largest id plus one, which is the minimum vocabulary size of a model.
    #[must_use]
    pub fn num_ids(&self) -> usize {
        self.num_ids
    }

    /// Returns a hash of the vocabulary, merges, rules and added tokens. It does not depend on the order or form of
    /// the file.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Returns a checksum of the file. Different programs write the same tokenizer as different bytes, so use
    /// [`hash`](Self::hash) to compare tokenizers.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// Returns the ids of a text. If `is_begun`, they follow the tokens that the file adds before a text, such as
    /// `<s>`. Tokens that it adds after a text are omitted, because the text continues.
    ///
    /// # Errors
    ///
    /// If the tokenizer has no token for a part of the text, and no token for unknown text.
    pub fn encode(&self, text: &str, is_begun: bool) -> Result<Vec<u32>, ModelError> {
        let encoded = caught(|| self.inner.encode_fast(text, false));
        let encoded = encoded.map_err(|problem| self.refused(problem))?;
        let front = if is_begun { &self.front[..] } else { &[] };
        Ok([front, encoded.get_ids()].concat())
    }

    /// Returns the text of an added token, such as `</s>`, which divides a text before it is tokenized; `None` for other
    /// tokens.
    pub fn added(&self, id: u32) -> Option<&str> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&id).map(|token| token.content.as_str())
    }

    /// Returns the token for unknown text, if there is one.
    pub(crate) fn unknown(&self) -> Option<u32> {
        self.unknown
    }

    /// Returns the tokens of several texts.
    pub(crate) fn encode_all(&self, texts: Vec<&str>) -> Result<Vec<Vec<Placed>>, ModelError> {
        let encoded = caught(|| self.inner.encode_batch(texts, false));
        let encoded = encoded.map_err(|problem| self.refused(problem))?;
        let tokens = |encoding: Encoding| -> Vec<Placed> {
            let ids = encoding.get_ids().iter().zip(encoding.get_offsets());
            let placed = ids.map(|(&id, &(start, end))| Placed { id, start, end });
            placed.collect()
        };
        Ok(encoded.into_iter().map(tokens).collect())
    }

    /// Decodes ids to text, without special tokens.
    ///
    /// # Errors
    ///
    /// If the tokenizer cannot decode the ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        let decoded = caught(|| self.inner.decode(ids, true));
        decoded.map_err(|problem| self.refused(problem))
    }

    pub(crate) fn refused(&self, problem: String) -> ModelError {
        ModelError::Tokenize {
            path: self.path.clone(),
            problem,
        }
    }
}

/// Runs a part of the tokenizer. Turns panics, which some inconsistent files cause, into errors.
fn caught<T>(body: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("its parts are inconsistent".to_owned()),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ModelError> {
    let file_error = |source| ModelError::File {
        path: path.to_owned(),
        source,
    };
    // This check comes before opening, because opening a pipe would wait for a writer.
    let metadata = path.metadata().map_err(file_error)?;
    if !metadata.is_file() || metadata.len() > MAX_BYTES {
        return Err(ModelError::NotATokenizer {
            path: path.to_owned(),
            problem: format!("it is not a regular file of at most {MAX_BYTES} bytes"),
        });
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(file_error)?;
    file.take(MAX_BYTES)
        .read_to_end(&mut bytes)
        .map_err(file_error)?;
    Ok(bytes)
}

/// Removes BPE dropout, which skips merges at random.
fn without_dropout(inner: &mut tokenizers::Tokenizer) {
    if let ModelWrapper::BPE(model) = inner.get_model()
        && model.dropout.is_some()
    {
        let mut model = model.clone();
        model.dropout = None;
        inner.with_model(model);
    }
}

/// Returns the token for unknown text, or `None` if there is none.
fn unknown_of(inner: &tokenizers::Tokenizer) -> Option<u32> {
    let id = |token: &str| inner.token_to_id(token);
    match inner.get_model() {
        ModelWrapper::BPE(model) => model.unk_token.as_deref().and_then(id),
        ModelWrapper::WordPiece(model) => id(&model.unk_token),
        ModelWrapper::WordLevel(model) => id(&model.unk_token),
        ModelWrapper::Unigram(model) => {
            let json = serde_json::to_value(model).ok()?;
            json["unk_id"].as_u64()?.try_into().ok()
        }
    }
}

/// Returns the tokens that the tokenizer adds before a text.
fn front_of(inner: &tokenizers::Tokenizer) -> tokenizers::Result<Vec<u32>> {
    let Some(processor) = inner.get_post_processor() else {
        return Ok(Vec::new());
    };
    let text = Encoding::from_tokens(vec![Token::new(0, "a".to_owned(), (0, 1))], 0);
    let whole = processor.process(text, None, true)?;
    let are_added = whole.get_special_tokens_mask().iter();
    let len = are_added.take_while(|is_added| **is_added == 1).count();
    Ok(whole.get_ids()[..len].to_vec())
}

/// Returns a hash of the tokenizer's behavior. It uses the library's own form, which does not depend on the form of
/// the file.
fn hash_of(inner: &tokenizers::Tokenizer) -> tokenizers::Result<u64> {
    let mut json = serde_json::to_value(inner)?;
    if let Some(parts) = json.as_object_mut() {
        NO_RULES.iter().for_each(|name| drop(parts.remove(*name)));
    }
    let mut hasher = SipHasher13::new();
    feed(&json, &mut hasher);
    Ok(hasher.finish())
}

/// Feeds a value to a hasher, with object keys in order. Empty, false and null values count as absent, because versions
/// of the library differ in the defaults that they write.
fn feed(value: &Value, hasher: &mut SipHasher13) {
    let mut add = |kind: u8, bytes: &[u8]| {
        hasher.write(&[kind]);
        hasher.write(&(bytes.len() as u64).to_le_bytes());
        hasher.write(bytes);
    };
    match value {
        Value::Null => add(0, &[]),
        Value::Bool(value) => add(1, &[u8::from(*value)]),
        Value::Number(value) => add(2, value.to_string().as_bytes()),
        Value::String(value) => add(3, value.as_bytes()),
        Value::Array(values) => {
            add(4, &(values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| feed(value, hasher));
        }
        Value::Object(members) => {
            let mut members: Vec<_> = members.iter().filter(|(_, value)| says(value)).collect();
            members.sort_unstable_by_key(|(name, _)| *name);
            add(5, &(members.len() as u64).to_le_bytes());
            for (name, value) in members {
                feed(&Value::from(name.as_str()), hasher);
                feed(value, hasher);
            }
        }
    }
}

/// Returns false for a value that counts as absent.
fn says(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(values) => !values.is_empty(),
        Value::Object(members) => !members.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    }
}

/// The conversion between text and the tokens of a model.
#[derive(Debug, Clone)]
pub enum TextCodec {
    /// Each byte is a token.
    Bytes,
    /// The tokens of a tokenizer.
    Tokenizer(Tokenizer),
}

impl TextCodec {
    /// Returns the minimum vocabulary size of a model with these tokens.
    #[must_use]
    pub fn num_ids(&self) -> usize {
        match self {
            Self::Bytes => BYTE_VOCAB,
            Self::Tokenizer(tokenizer) => tokenizer.num_ids(),
        }
    }

    /// Checks that a model with the vocabulary size `vocab` has all tokens.
    ///
    /// # Errors
    ///
    /// [`ModelError::VocabTooSmall`] for bytes, [`ModelError::TooManyIds`] for a tokenizer.
    pub fn check_vocab(&self, vocab: usize) -> Result<(), ModelError> {
        match self {
            _ if self.num_ids() <= vocab => Ok(()),
            Self::Bytes => Err(ModelError::VocabTooSmall { vocab }),
            Self::Tokenizer(tokenizer) => Err(ModelError::TooManyIds {
                path: tokenizer.path().to_owned(),
                num_ids: tokenizer.num_ids,
                vocab,
            }),
        }
    }

    /// Tokenizes the beginning of a text, including the tokens that a tokenizer adds before it.
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

    /// Decodes tokens to text. With [`Bytes`](Self::Bytes), the result need not be UTF-8.
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
